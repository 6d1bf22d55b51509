//! Directories that are not what they seem to be, or have moved.

#![allow(clippy::disallowed_methods, reason = "a test lays out what is there")]

use std::os::unix::fs::PermissionsExt as _;

use super::super::identity::parse;
use super::*;

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn an_identifier_says_in_which_pool_a_volume_is() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (here, there) = (store(one.path()), store(two.path()));
    let id = there.create(new("v", "fast", 512)).unwrap().id;
    let parts = parse(&id).unwrap();
    let marker = std::fs::read_to_string(two.path().join("fast/.pool")).unwrap();
    assert!(marker.contains(parts.uuid.unwrap()), "{marker}");
    // A volume of another host: the calls must not succeed.
    let words = [&*id, "belongs to the pool fast (", "), which is not on the host"];
    says(here.get(&id), VolumeError::Elsewhere, &words);
    says(here.remove(&id), VolumeError::Elsewhere, &words);
    says(here.publish(&id, None), VolumeError::Elsewhere, &words);
    // In a pool of this host, a volume without a record does not exist.
    there.remove(&id).unwrap();
    assert!(there.get(&id).unwrap().is_none());
    // A text that does not have the form of an identifier refers to no volume of any host.
    assert!(here.get("pvc-1").unwrap().is_none());
    // A directory that was moved to another host keeps its volumes.
    let id = there.create(new("v", "full", 512)).unwrap().id;
    drop((here, there));
    std::fs::remove_dir_all(one.path().join("full")).unwrap();
    std::fs::rename(two.path().join("full"), one.path().join("full")).unwrap();
    // The register names another pool for this path.
    let words =
        [&*format!("the pool {} is at its path", parse(&id).unwrap().uuid.unwrap()), "remove the line of"];
    says(store(one.path()).get(&id), VolumeError::Unavailable, &words);
    std::fs::remove_file(one.path().join("pools.json")).unwrap();
    assert!(store(one.path()).get(&id).unwrap().is_some());
    says(
        store(two.path()).get(&id),
        VolumeError::Unavailable,
        &["mount its file system there", "may be in it"],
    );
}

#[test]
fn a_pool_that_is_not_mounted_is_not_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let id = store(folder.path()).create(new("v", "fast", 512)).unwrap().id;
    let (path, elsewhere) = (folder.path().join("fast"), folder.path().join("elsewhere"));
    std::fs::rename(&path, &elsewhere).unwrap();
    let uuid = parse(&id).unwrap().uuid.unwrap();
    let refused = |words: &[&str]| {
        let store = store(folder.path());
        says(store.create(new("v", "fast", 512)), VolumeError::Unavailable, words);
        says(store.get(&id), VolumeError::Unavailable, words);
        says(store.remove(&id), VolumeError::Unavailable, words);
        store
    };
    // The path does not exist, or its directory is empty.
    drop(refused(&["No such file or directory", "mount its file system there"]));
    assert!(!path.exists());
    std::fs::create_dir(&path).unwrap();
    let words = ["it has no .pool", uuid, "mount its file system there", "pools.json"];
    let store = refused(&words);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "nothing is written there");
    // The other pools are not affected.
    store.create(new("w", "full", 512)).unwrap();
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&elsewhere, &path).unwrap();
    open(&store);
    assert!(store.get(&id).unwrap().is_some());
    drop(store);
    // The old pool is abandoned, and a new one begins.
    std::fs::rename(&path, &elsewhere).unwrap();
    let register = folder.path().join("pools.json");
    let text = std::fs::read_to_string(&register).unwrap();
    let mut kept: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(kept["pools"].as_object_mut().unwrap().remove(path.to_str().unwrap()).unwrap(), uuid);
    std::fs::write(&register, kept.to_string()).unwrap();
    let store = self::store(folder.path());
    let other = store.create(new("v", "fast", 512)).unwrap().id;
    assert_ne!(parse(&other).unwrap().uuid.unwrap(), uuid);
    says(store.get(&id), VolumeError::Elsewhere, &["which is not on the host"]);
}

#[test]
fn a_copy_of_a_pool_and_what_it_was_copied_from_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [original, other]: [Pool; 2] =
        ["fast", "copy"].map(|name| pool(folder.path(), name, Format::Raw, Allocation::Thin));
    let (settings, followed) = watch::channel(vec![original.clone()]);
    let store = opened(Store::new(followed, register(folder.path())));
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    copy(&original.path, &other.path);
    for both in [vec![original.clone(), other.clone()], vec![other.clone(), original.clone()]] {
        settings.send_replace(both);
        open(&store);
        let words =
            ["have the same UUID, so one is a copy of the other; remove one of them from the settings"];
        says(store.get(&id), VolumeError::Unavailable, &words);
        says(store.remove(&id), VolumeError::Unavailable, &words);
        says(store.create(new("w", "fast", 512)), VolumeError::Unavailable, &words);
        says(store.create(new("w", "copy", 512)), VolumeError::Unavailable, &words);
        let problem = only(&store).problem.unwrap();
        assert!(problem.contains("another pool has the same UUID") && !problem.contains('/'), "{problem}");
    }
    settings.send_replace(vec![original.clone()]);
    assert_eq!(only(&store).problem, None);
    assert!(store.get(&id).unwrap().is_some());
    settings.send_replace(vec![other]);
    open(&store);
    assert!(store.get(&id).unwrap().unwrap().image().starts_with(folder.path().join("copy")));
    // Both at once, from the start.
    let both = vec![original, pool(folder.path(), "copy", Format::Raw, Allocation::Thin)];
    drop(store);
    let store = opened(of(both));
    says(store.get(&id), VolumeError::Unavailable, &["have the same UUID"]);
    says(store.create(new("w", "copy", 512)), VolumeError::Unavailable, &["have the same UUID"]);
}

#[test]
fn a_pool_that_has_lost_its_uuid_gets_no_other_one() {
    let folder = tempfile::tempdir().unwrap();
    let id = store(folder.path()).create(new("v", "fast", 512)).unwrap().id;
    let marker = folder.path().join("fast/.pool");
    std::fs::remove_file(&marker).unwrap();
    let store = store(folder.path());
    let error = store.get(&id).unwrap_err().to_string();
    assert!(error.contains(".pool in it is missing, but it has volumes"), "{error}");
    let line = &error[error.find('{').unwrap()..=error.find('}').unwrap()];
    std::fs::write(&marker, line).unwrap();
    open(&store);
    assert!(store.get(&id).unwrap().is_some());
    drop(store);
    // The same applies to volumes with unusable records.
    let record = folder.path().join(format!("fast/{}.json", serial(&id)));
    let kept = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, kept.replace("\"version\": 1", "\"version\": 2")).unwrap();
    std::fs::remove_file(&marker).unwrap();
    says(self::store(folder.path()).get(&id), VolumeError::Unavailable, &[".pool in it is missing"]);
    assert!(!marker.exists());
    std::fs::write(&marker, "{}").unwrap();
    let store = self::store(folder.path());
    says(store.get(&id), VolumeError::Unavailable, &[".pool in it cannot be used: missing field"]);
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fast");
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let store = store(folder.path());
    let words = [path.to_str().unwrap(), "it has mode 0777, so everybody can write to it; chmod o-w"];
    says(store.create(new("v", "fast", 512)), VolumeError::Unavailable, &words);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "nothing is written there");
    store.create(new("v", "full", 512)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o711)).unwrap();
    open(&store);
    store.create(new("w", "fast", 512)).unwrap();
}

#[test]
fn what_is_at_the_path_later_is_another_pool() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let id = store.create(new("v", "fast", 512)).unwrap().id;
    let path = folder.path().join("fast");
    let moved = folder.path().join("moved");
    std::fs::rename(&path, &moved).unwrap();
    std::fs::create_dir(&path).unwrap();
    // Until the change is noticed, operations use the directory that was opened, and QEMU gets no other file.
    assert!(store.give(&id, None).is_err());
    store.publish(&id, Some(published(1))).unwrap();
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    open(&store);
    says(store.get(&id), VolumeError::Unavailable, &["its directory is missing or has been replaced"]);
    open(&store);
    assert_eq!(store.list(), []);
    says(store.get(&id), VolumeError::Unavailable, &["it has no .pool", "mount its file system there"]);
    // No directory is created in place of a pool that has disappeared.
    std::fs::remove_dir_all(&path).unwrap();
    open(&store);
    open(&store);
    says(store.get(&id), VolumeError::Unavailable, &["No such file or directory"]);
    assert!(!path.exists());
    std::fs::rename(&moved, &path).unwrap();
    open(&store);
    let found = store.get(&id).unwrap().unwrap();
    assert_eq!(found.record.volume(None).published, Some(published(1)));
    store.give(&id, None).unwrap();
}
