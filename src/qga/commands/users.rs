//! Command that lists the users that are logged in.

use serde::Serialize;

use crate::guest::users;
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::reply::Reply;
use crate::qga::table::{Command, Pending, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[Command {
    name: "guest-get-users",
    role: Some(Role::Status),
    since: "2.10",
    returns: "[{user, login-time (seconds since 1970)}]",
    summary: "Who is logged in, each user once, and since when.",
    differences: "Where there is no utmp, as in Debian 13, logind's sessions are listed.",
    run: Run::Later(get_users),
    ..Command::USUAL
}];

/// Implements `guest-get-users`.
pub fn get_users<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct User {
        user: String,
        login_time: f64,
    }
    Box::pin(async move {
        call.arguments.none()?;
        let users = users::users(&call.context.guest).await?;
        let reply = |user: users::User| User { user: user.name, login_time: user.since.as_secs_f64() };
        Reply::value(&users.into_iter().map(reply).collect::<Vec<_>>())
    })
}
