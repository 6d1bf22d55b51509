//! Command that is executed for a task: the program itself as the user, or runuser(1), which logs the user in.

use std::ffi::OsString;
use std::path::PathBuf;

use super::login::{self, Login};
use super::task::{Task, environment};
use crate::sys::root::Root;
use crate::sys::spawn_manner::Identity;
use crate::sys::user_identity::Account;

/// Command to execute for a task.
pub(super) struct What {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    pub identity: Identity,
    pub directory: PathBuf,
    pub or_root: bool,
    /// Executable that the caller must be allowed to run, if different from the program.
    pub judged: Option<PathBuf>,
}

impl What {
    /// Returns the command for this task, run as this account.
    pub fn of(root: &Root, account: &Account, task: &Task) -> Self {
        if task.is_login {
            let Login { arguments, environment, shell } = login::login(root, account, task);
            let identity = Identity { uid: 0, gid: 0, groups: vec![0] };
            let (program, directory, judged) = (login::RUNUSER.into(), "/".into(), Some(shell));
            return Self { program, arguments, environment, identity, directory, or_root: false, judged };
        }
        let mut command = task.command.iter().cloned();
        Self {
            program: command.next().unwrap_or_default(),
            arguments: command.collect(),
            environment: environment(account, task),
            identity: account.identity.clone(),
            directory: task.directory.clone().unwrap_or_else(|| account.home.clone()),
            or_root: task.directory.is_none(),
            judged: None,
        }
    }
}
