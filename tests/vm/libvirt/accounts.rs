//! Passwords and SSH keys.

use anyhow::ensure;

use super::Check;
use crate::harness::libvirt::Domain;

const GET_KEYS: &str = "guest-ssh-get-authorized-keys";
const ADD_KEYS: &str = "guest-ssh-add-authorized-keys";
const REMOVE_KEYS: &str = "guest-ssh-remove-authorized-keys";

pub const CHECKS: &[Check] = &[
    Check("set-user-password", &["guest-set-user-password"], password),
    Check("set-user-password --encrypted", &["guest-set-user-password"], encrypted_password),
    Check("set-user-sshkeys", &[GET_KEYS, ADD_KEYS], add_keys),
    Check("set-user-sshkeys --remove", &[GET_KEYS, ADD_KEYS, REMOVE_KEYS], remove_keys),
    Check("set-user-sshkeys --reset", &[GET_KEYS, ADD_KEYS], reset_keys),
];

fn shadow(domain: &Domain) -> anyhow::Result<String> {
    Ok(domain.run("getent shadow alice | cut -d : -f 2")?.trim().to_owned())
}

/// Whether the guest's own `crypt` takes the password for alice's.
fn accepts(domain: &Domain, password: &str) -> anyhow::Result<bool> {
    let hash = shadow(domain)?;
    let program = "print crypt($ARGV[0], $ARGV[1]) eq $ARGV[1] ? 1 : 0";
    Ok(domain.run(&format!("perl -e '{program}' '{password}' '{hash}'"))? == "1")
}

fn password(domain: &Domain) -> anyhow::Result<()> {
    // "Zauberwort 1", as libvirt sends it.
    const BASE64: &str = "WmF1YmVyd29ydCAx";
    let before = shadow(domain)?;
    domain.verb("set-user-password", &["alice", "Zauberwort 1"])?;
    ensure!(shadow(domain)? != before, "/etc/shadow has not changed");
    ensure!(accepts(domain, "Zauberwort 1")? && !accepts(domain, "Zauberwort 2")?);
    let journal =
        domain.run(&format!("journalctl --no-pager | grep -c -e {BASE64} -e 'Zauberwort 1' || :"))?;
    ensure!(journal.trim() == "0", "the password is in the journal {journal} times");
    let error = domain.verb("set-user-password", &["nobody-here", "secret"]).unwrap_err().to_string();
    ensure!(error.contains("guest agent command failed"), "{error}");
    Ok(())
}

fn encrypted_password(domain: &Domain) -> anyhow::Result<()> {
    let hash = domain.run("perl -e 'print crypt(\"Passwort\", \"\\$6\\$salt\\$\")'")?;
    domain.verb("set-user-password", &["alice", &hash, "--encrypted"])?;
    ensure!(shadow(domain)? == hash && accepts(domain, "Passwort")?, "{hash}");
    Ok(())
}

const ONE: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBBB1 alice@one";
const TWO: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBBB2 alice@two";
const FILE: &str = "/home/alice/.ssh/authorized_keys";

fn set_keys(domain: &Domain, keys: &[&str], how: &[&str]) -> anyhow::Result<()> {
    let file = domain.file("keys");
    std::fs::write(&file, keys.join("\n") + "\n")?;
    let file = file.display().to_string();
    let mut arguments = vec!["alice", "--file", &file];
    arguments.extend(how);
    domain.verb("set-user-sshkeys", &arguments).map(drop)
}

/// virsh prints keys without an end of line.
fn has_keys(domain: &Domain, keys: &[&str]) -> anyhow::Result<()> {
    let said = domain.verb("get-user-sshkeys", &["alice"])?;
    let length: usize = keys.iter().map(|key| key.len()).sum();
    ensure!(keys.iter().all(|key| said.contains(key)), "{keys:?} are due, {said:?} is said");
    ensure!(said.replace('\n', "").len() == length, "{keys:?} are due, {said:?} is said");
    Ok(())
}

fn add_keys(domain: &Domain) -> anyhow::Result<()> {
    set_keys(domain, &[ONE], &[])?;
    has_keys(domain, &[ONE])?;
    set_keys(domain, &[ONE, TWO], &[])?;
    has_keys(domain, &[ONE, TWO])?;
    let there = domain.run(&format!("stat --format '%U %G %a' /home/alice/.ssh {FILE}; sort {FILE}"))?;
    ensure!(there == format!("alice alice 700\nalice alice 600\n{ONE}\n{TWO}\n"), "{there}");
    ensure!(domain.verb("get-user-sshkeys", &["nobody-here"]).is_err());
    Ok(())
}

fn remove_keys(domain: &Domain) -> anyhow::Result<()> {
    set_keys(domain, &[ONE, TWO], &["--reset"])?;
    domain.run(&format!("echo '# of her own' >> {FILE}"))?;
    set_keys(domain, &[ONE], &["--remove"])?;
    has_keys(domain, &[TWO])?;
    ensure!(domain.run(&format!("cat {FILE}"))?.contains("# of her own"), "a comment is lost");
    Ok(())
}

fn reset_keys(domain: &Domain) -> anyhow::Result<()> {
    set_keys(domain, &[TWO], &["--reset"])?;
    has_keys(domain, &[TWO])?;
    set_keys(domain, &[ONE], &["--reset"])?;
    has_keys(domain, &[ONE])?;
    domain.verb("set-user-sshkeys", &["alice", "--reset"])?;
    has_keys(domain, &[])
}
