//! Commands that change the credentials of users: passwords and SSH keys.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::guest::passwords::{self, Secret};
use crate::guest::ssh_keys::{self, Change};
use crate::policy::Role;
use crate::qga::arguments::{Refused, Value};
use crate::qga::base64::Base64;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Pending, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-set-user-password",
        role: Some(Role::Accounts),
        since: "2.3",
        arguments: "username, password (base64), crypted (whether it is as crypt(5) makes it)",
        class: Class::Credentials,
        audited: true,
        summary: "Sets the password of a user.",
        differences: "The error contains the message of chpasswd. An unknown user is reported before it runs.",
        run: Run::Later(set_user_password),
        ..Command::USUAL
    },
    Command {
        name: "guest-ssh-add-authorized-keys",
        role: Some(Role::Accounts),
        since: "5.2",
        arguments: "username, keys[string], reset? (whether they take the place of all others)",
        class: Class::Credentials,
        audited: true,
        summary: "Adds lines to a user's ~/.ssh/authorized_keys.",
        differences: "Line breaks around a key are removed, where qemu-ga refuses the key. The file is \
                      replaced in one step, and only if something changes; its other lines stay as they are. \
                      Symbolic links below the home are not followed, and all is done with the user's \
                      rights.",
        run: Run::Later(add_keys),
        ..Command::USUAL
    },
    Command {
        name: "guest-ssh-get-authorized-keys",
        role: Some(Role::Accounts),
        since: "5.2",
        arguments: "username",
        returns: "keys[string]",
        class: Class::Credentials,
        audited: true,
        summary: "The lines of a user's ~/.ssh/authorized_keys, without comments.",
        differences: "A user without that file has no keys, where qemu-ga gives an error.",
        run: Run::Later(get_keys),
        ..Command::USUAL
    },
    Command {
        name: "guest-ssh-remove-authorized-keys",
        role: Some(Role::Accounts),
        since: "5.2",
        arguments: "username, keys[string]",
        class: Class::Credentials,
        audited: true,
        summary: "Removes lines from a user's ~/.ssh/authorized_keys.",
        differences: "As guest-ssh-add-authorized-keys. If the file does not exist, there is nothing to remove.",
        run: Run::Later(remove_keys),
        ..Command::USUAL
    },
];

/// Implements `guest-set-user-password`.
pub fn set_user_password<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (user, Password(password), crypted) = call.arguments.read(|arguments| {
            let user: String = arguments.required("username")?;
            call.concerns(user.as_str());
            Ok((user, arguments.required("password")?, arguments.required("crypted")?))
        })?;
        call.check("guest-set-user-password").password()?;
        passwords::set(&call.context.guest, user, password, crypted).await?;
        Ok(Reply::empty())
    })
}

/// Password in base64.
struct Password(Secret);

impl Value<'_> for Password {
    fn read(value: &RawValue) -> Result<Self, Refused> {
        let Base64(bytes) = Base64::read(value)?;
        Ok(Self(Secret::new(bytes)))
    }
}

/// Implements `guest-ssh-get-authorized-keys`.
pub fn get_keys<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    struct Keys {
        keys: Vec<String>,
    }
    Box::pin(async move {
        let user: String = call.arguments.read(|arguments| arguments.required("username"))?;
        call.concerns(user.as_str());
        Reply::value(&Keys { keys: ssh_keys::list(&call.context.guest, user).await? })
    })
}

/// Implements `guest-ssh-add-authorized-keys`.
pub fn add_keys<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (user, keys, reset) = call.arguments.read(|arguments| {
            let user: String = arguments.required("username")?;
            call.concerns(user.as_str());
            let reset: Option<bool> = arguments.optional("reset")?;
            Ok((user, arguments.required("keys")?, reset.unwrap_or(false)))
        })?;
        let change = if reset { Change::Reset(keys) } else { Change::Add(keys) };
        ssh_keys::change(&call.context.guest, user, change).await?;
        Ok(Reply::empty())
    })
}

/// Implements `guest-ssh-remove-authorized-keys`.
pub fn remove_keys<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        let (user, keys) = call.arguments.read(|arguments| {
            let user: String = arguments.required("username")?;
            call.concerns(user.as_str());
            Ok((user, arguments.required("keys")?))
        })?;
        ssh_keys::change(&call.context.guest, user, Change::Remove(keys)).await?;
        Ok(Reply::empty())
    })
}
