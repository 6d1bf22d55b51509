//! Mount options of a share. Pure.
//!
//! The operator of the server recommends options, and the storage class of the claim adds to them. If none are
//! recommended, those are used that Longhorn, which provides Harvester's share servers, uses itself. With
//! `softerr` a request that is not answered for minutes fails (`ETIMEDOUT`): programs get an error, and a node is
//! not left with processes that nothing can end. To wait instead, the mount option `hard` can be set like any
//! other.

use super::Share;
use crate::guest::pod_volumes::Error;
use crate::guest::volumes;
use crate::guest::volumes::options::Options;
use crate::sys::mountinfo::Mount;

/// Options that are used if none are recommended.
const USUAL: [&str; 5] = ["vers=4.1", "noresvport", "softerr", "timeo=600", "retrans=5"];
/// Options of mount.nfs(8), which is not used here; ignored.
const IGNORED: [&str; 4] = ["bg", "fg", "retry", "sloppy"];
/// Flags that also apply to bind mounts of a share.
const BOUND: [&str; 3] = ["nosuid", "nodev", "noexec"];
/// Options that the share itself sets.
const REFUSED: [&str; 4] = ["addr", "clientaddr", "mountaddr", "mountproto"];

fn name(option: &str) -> &str {
    option.split('=').next().unwrap_or_default()
}

/// Returns the options of a share together with those of its claim.
///
/// # Errors
/// If one of them cannot be used.
pub(super) fn of(share: &Share, claims: &[String], read_only: bool) -> Result<Options, Error> {
    let usual: Vec<_> = USUAL.map(str::to_owned).into();
    let recommended = if share.options.is_empty() { &usual } else { &share.options };
    let all: Vec<_> = recommended.iter().chain(claims).cloned().collect();
    let parsed = Options::parse(&all, read_only)?;
    let mut options = Options { flags: parsed.flags, data: String::new() };
    // The last version wins. For other options the kernel itself applies them in order; for versions it does not.
    let is_version = |option: &str| matches!(name(option), "vers" | "nfsvers" | "minorversion");
    let version = parsed.data.split(',').rfind(|option| is_version(option)).unwrap_or("vers=4.1");
    if !matches!(version.split_once('='), Some(("vers" | "nfsvers", value)) if value.starts_with('4')) {
        return Err(wrong(version, "cannot be used: shares are mounted with NFS 4, such as vers=4.1"));
    }
    options.own(version);
    for option in parsed.data.split(',').filter(|option| !option.is_empty() && !is_version(option)) {
        if REFUSED.contains(&name(option)) {
            return Err(wrong(option, "cannot be used: the server is chosen by the host half"));
        }
        if !IGNORED.contains(&name(option)) {
            options.own(option);
        }
    }
    options.own(&format!("addr={}", share.server));
    Ok(options)
}

fn wrong(option: &str, problem: &'static str) -> Error {
    volumes::Error::wrong(format!("the mount option {option:?}"), problem).into()
}

/// Returns the options of an existing mount, for a mount of the same share from elsewhere: all but those that name
/// the server or were negotiated with it.
pub(super) fn of_mount(mount: &Mount) -> Vec<String> {
    const OF_THE_SERVER: [&str; 7] =
        ["addr", "clientaddr", "mountaddr", "namlen", "local_lock", "proto", "port"];
    // Both lists contain the read-only state, which the caller passes separately.
    let is_kept = |option: &&str| {
        !matches!(*option, "ro" | "rw") && (*option == "proto=rdma" || !OF_THE_SERVER.contains(&name(option)))
    };
    let all = mount.options.split(',').chain(mount.flags.split(','));
    all.filter(is_kept).map(str::to_owned).collect()
}

/// Returns the options of a claim that also apply to bind mounts of a share; the others belong to the file system.
pub(super) fn of_bind(claims: &[String]) -> Vec<String> {
    let all = claims.iter().flat_map(|some| some.split(','));
    all.filter(|option| BOUND.contains(option)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use nix::mount::MsFlags;

    use super::*;
    use crate::sys::mountinfo;

    fn data(recommended: &[&str], claims: &[&str]) -> Result<String, String> {
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let share = Share {
            volume: "v".into(),
            server: "fd00::1".parse().unwrap(),
            path: "/v".into(),
            options: texts(recommended),
        };
        of(&share, &texts(claims), false).map(|options| options.data).map_err(|error| error.to_string())
    }

    #[test]
    fn the_last_word_counts() {
        let usual = "vers=4.1,noresvport,softerr,timeo=600,retrans=5,addr=fd00::1";
        assert_eq!(data(&[], &[]).unwrap(), usual);
        assert_eq!(data(&["vers=4.2,hard"], &[]).unwrap(), "vers=4.2,hard,addr=fd00::1");
        let both = data(&["vers=4.1,soft"], &["hard", "nfsvers=4.0,noatime,retry=2"]).unwrap();
        assert_eq!(both, "nfsvers=4.0,soft,hard,addr=fd00::1");
        for (claims, words) in [
            ("vers=3", "shares are mounted with NFS 4"),
            ("minorversion=1", "shares are mounted with NFS 4"),
            ("addr=10.0.0.1", "chosen by the host half"),
            ("bind", "cannot be used here"),
        ] {
            let error = data(&[], &[claims]).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(of_bind(&["hard,nosuid".into(), "noexec".into()]), ["nosuid", "noexec"]);
    }

    #[test]
    fn what_a_mount_has_is_kept_elsewhere() {
        let line = "36 25 0:52 / /a ro,nosuid,noatime - nfs4 10.0.0.1:/v ro,sync,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,\
                    acregmin=0,noac,softerr,noresvport,proto=tcp,nconnect=4,timeo=600,retrans=5,sec=krb5p,clientaddr=10.0.0.7,\
                    lookupcache=none,local_lock=none,addr=10.0.0.1\n";
        let mount = mountinfo::parse(line.as_bytes()).pop().unwrap();
        let share = Share {
            volume: "v".into(),
            server: "fd00::2".parse().unwrap(),
            path: "/v".into(),
            options: Vec::new(),
        };
        let options = of(&share, &of_mount(&mount), true).unwrap();
        let expected = "vers=4.2,noresvport,softerr,timeo=600,retrans=5,rsize=1048576,wsize=1048576,acregmin=0,noac,nconnect=4,\
                        sec=krb5p,lookupcache=none,addr=fd00::2";
        assert_eq!(options.data, expected);
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_SYNCHRONOUS | MsFlags::MS_NOSUID | MsFlags::MS_NOATIME;
        assert_eq!(options.flags, flags);
    }

    #[test]
    fn read_only_is_a_flag() {
        let share = Share {
            volume: "v".into(),
            server: "10.0.0.1".parse().unwrap(),
            path: "/v".into(),
            options: Vec::new(),
        };
        assert!(of(&share, &[], true).unwrap().flags.contains(MsFlags::MS_RDONLY));
    }
}
