//! Records and images that this program did not create in this form.

#![allow(clippy::disallowed_methods, reason = "a test lays out what is there")]

use std::os::unix::fs::symlink;

use super::*;

/// Reads the record of a volume as JSON.
fn kept(path: &Path, pool: &str, id: &str) -> (PathBuf, serde_json::Value) {
    let path = path.join(pool).join(format!("{}.json", serial(id)));
    let kept = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (path, kept)
}

#[test]
fn a_record_of_a_newer_program_keeps_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let id = store(folder.path()).create(new("v", "fast", 512)).unwrap().id;
    let (path, before) = kept(folder.path(), "fast", &id);
    let mut newer = before.clone();
    newer["version"] = 2.into();
    newer["readers"] = 2.into();
    std::fs::write(&path, newer.to_string()).unwrap();

    let store = store(folder.path());
    let volume = only(&store);
    assert_eq!(
        (volume.id.as_str(), volume.name.as_str(), volume.cluster.as_str()),
        (id.as_str(), "v", "dev")
    );
    assert!(volume.problem.unwrap().contains("that support version 2"));
    let words = [path.to_str().unwrap(), "run a newer guestlet-host"];
    says(store.get(&id), VolumeError::Damaged, &words);
    says(store.remove(&id), VolumeError::Damaged, &words);
    says(store.publish(&id, Some(published(1))), VolumeError::Damaged, &words);
    says(store.create(new("v", "fast", 512)), VolumeError::Unavailable, &words);
    assert_eq!(files(folder.path()).len(), 2);
    // A volume with a different name is not affected.
    let other = store.create(new("w", "fast", 512)).unwrap().id;
    store.remove(&other).unwrap();

    // A newer record that permits this program to use it is used, and its unknown fields are preserved.
    newer["readers"] = 1.into();
    newer["labels"] = serde_json::json!({ "of": "a newer one" });
    std::fs::write(&path, newer.to_string()).unwrap();
    open(&store);
    store.publish(&id, Some(published(1))).unwrap();
    let (_, mut now) = kept(folder.path(), "fast", &id);
    assert_eq!(now["published"].take()["vm"], "vm-1");
    now.as_object_mut().unwrap().remove("published");
    assert_eq!(now, newer);
}

#[test]
fn a_record_that_is_garbage_stops_its_pool_and_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    drop(store);
    let (path, _) = kept(folder.path(), "fast", &id);
    std::fs::write(&path, "{\"name\": \"v").unwrap();
    let store = self::store(folder.path());
    assert!(only(&store).problem.unwrap().contains("EOF"));
    says(store.get(&id), VolumeError::Damaged, &["EOF"]);
    let words =
        [path.to_str().unwrap(), "none is created in this pool", "move both files out of the directory"];
    says(store.create(new("w", "fast", 512)), VolumeError::Unavailable, &words);
    // Other pools are not affected.
    let other = store.create(new("w", "full", 512)).unwrap().id;
    store.remove(&other).unwrap();
    for ending in ["json", "raw"] {
        let file = format!("{}.{ending}", serial(&id));
        std::fs::rename(folder.path().join("fast").join(&file), folder.path().join(&file)).unwrap();
    }
    store.create(new("w", "fast", 512)).unwrap();
    assert_eq!(only(&store).name, "w");
}

#[test]
fn an_image_whose_record_is_lost_is_damaged_and_never_gone() {
    for class in ["fast", "qcow"] {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let id = store.create(new("v", class, 1 << 16)).unwrap().id;
        drop(store);
        let (record, _) = kept(folder.path(), class, &id);
        let kept = std::fs::read(&record).unwrap();
        std::fs::remove_file(&record).unwrap();
        let store = self::store(folder.path());
        let volume = only(&store);
        assert_eq!(volume.id, id);
        assert!(volume.problem.unwrap().contains("its record cannot be used: it is missing"));
        let image = format!("{}.{}", serial(&id), if class == "fast" { "raw" } else { "qcow2" });
        let words = [record.to_str().unwrap(), &image, "restore the record from a copy"];
        says(store.get(&id), VolumeError::Damaged, &words);
        says(store.remove(&id), VolumeError::Damaged, &words);
        says(store.publish(&id, None), VolumeError::Damaged, &words);
        // The damaged volume may have any name, so none is free.
        says(
            store.create(new("v", class, 1 << 16)),
            VolumeError::Unavailable,
            &["none is created in this pool"],
        );
        open(&store);
        assert_eq!(files(folder.path()), std::slice::from_ref(&image), "it stays");

        std::fs::write(&record, kept).unwrap();
        open(&store);
        assert_eq!((only(&store).name, only(&store).problem), ("v".to_owned(), None));
        store.remove(&id).unwrap();
        assert!(store.get(&id).unwrap().is_none());
        store.create(new("v", class, 1 << 16)).unwrap();
    }
}

#[test]
fn a_record_that_is_of_another_volume_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    drop(store);
    let (path, mut kept) = kept(folder.path(), "fast", &id);
    let of_another_pool = id.replace(id.split('.').nth(1).unwrap(), &"f".repeat(32));
    kept["id"] = of_another_pool.clone().into();
    std::fs::write(&path, kept.to_string()).unwrap();
    let store = self::store(folder.path());
    says(store.get(&id), VolumeError::Damaged, &["it is of another pool's volume"]);
    says(store.get(&of_another_pool), VolumeError::Elsewhere, &["belongs to the pool fast (ffff"]);
    drop(store);

    kept["id"] = id.clone().into();
    std::fs::write(&path, kept.to_string()).unwrap();
    // Sorts before any serial number that is drawn.
    let other = "a0000000000000000000";
    std::fs::rename(&path, path.with_file_name(format!("{other}.json"))).unwrap();
    let store = self::store(folder.path());
    let [found, image] = store.list().try_into().unwrap();
    assert_eq!((found.name.as_str(), serial(&found.id)), ("v", other));
    assert!(found.problem.unwrap().contains("it is of another volume"));
    // The image whose record was lost.
    assert_eq!((&image.id, image.name.as_str()), (&id, ""));
    says(store.get(&format!("fast.{other}")), VolumeError::Damaged, &["it is of another volume"]);
    assert_eq!(files(folder.path()).len(), 2, "nothing is thrown away");
}

#[test]
fn what_is_no_image_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    let image = store.entry(&id).unwrap().image();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "of somebody else").unwrap();
    let put: [(&str, &dyn Fn()); 3] = [
        ("its image is a symbolic link", &|| symlink(&secret, &image).unwrap()),
        ("its image has 2 hard links", &|| std::fs::hard_link(&secret, &image).unwrap()),
        ("its image is not a regular file", &|| std::fs::create_dir(&image).unwrap()),
    ];
    std::fs::remove_file(&image).unwrap();
    for (words, put) in put {
        put();
        open(&store);
        assert!(only(&store).problem.unwrap().contains(words));
        says(store.sound(&id), VolumeError::Damaged, &[words]);
        says(store.grow(&id, 1024).map(drop), VolumeError::Damaged, &[words]);
        says(store.give(&id, None), VolumeError::Damaged, &[words]);
        says(store.remove(&id), VolumeError::Damaged, &[words]);
        assert!(image.symlink_metadata().is_ok(), "{words}");
        if image.is_dir() && !image.is_symlink() {
            std::fs::remove_dir(&image).unwrap();
        } else {
            std::fs::remove_file(&image).unwrap();
        }
    }
    assert_eq!(std::fs::read(&secret).unwrap(), b"of somebody else");
    // A volume whose image is missing can be removed, and nothing else.
    says(store.sound(&id), VolumeError::Damaged, &["its image is missing"]);
    store.remove(&id).unwrap();
    assert_eq!(files(folder.path()), [""; 0]);
}

#[test]
fn what_programs_before_this_one_left_is_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let ids = ["a", "b", "c"].map(|name| store.create(new(name, "fast", 512)).unwrap().id);
    drop(store);
    for (id, stage) in ids.iter().zip(["ready", "making", "removing"]) {
        let (path, mut kept) = kept(folder.path(), "fast", id);
        kept["id"] = format!("fast.{}", serial(id)).into();
        kept["stage"] = stage.into();
        std::fs::write(&path, kept.to_string()).unwrap();
    }
    std::fs::remove_file(folder.path().join("fast/.pool")).unwrap();
    std::fs::remove_file(folder.path().join("pools.json")).unwrap();
    let store = self::store(folder.path());
    let [ready, making, removing] = ids.map(|id| format!("fast.{}", serial(&id)));
    assert_eq!(only(&store).id, ready);
    assert_eq!(files(folder.path()).len(), 2);
    // A removed volume is known to be removed; an unfinished one was never reported to a client.
    assert!(store.get(&removing).unwrap().is_none());
    says(store.get(&making), VolumeError::Elsewhere, &["has no record of the volume", &making]);
    store.publish(&ready, Some(published(1))).unwrap();
    store.publish(&ready, None).unwrap();
    store.grow(&ready, 1024).unwrap();
    store.remove(&ready).unwrap();
    drop(store);
    let store = self::store(folder.path());
    assert!(store.get(&ready).unwrap().is_none());
    assert!(store.get(&removing).unwrap().is_none());
    says(store.get("fast.aaaaaaaaaaaaaaaaaaaa"), VolumeError::Elsewhere, &["does not show which host"]);
}
