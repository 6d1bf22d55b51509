//! Commands about blocks of memory.

use std::io;

use serde::Serialize;

use crate::guest::memory_blocks::{self, Block, Outcome as Became};
use crate::policy::Role;
use crate::qga::arguments::Members;
use crate::qga::call::Call;
use crate::qga::commands::processors::{in_words, switched};
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Outcome, Pending, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-memory-block-info",
        role: Some(Role::Status),
        since: "2.3",
        returns: "size (bytes)",
        summary: "The size of a block of memory.",
        run: Run::Now(get_memory_block_info),
        ..Command::USUAL
    },
    Command {
        name: "guest-get-memory-blocks",
        role: Some(Role::Status),
        since: "2.3",
        returns: "[{phys-index, online, can-offline}]",
        summary: "The blocks that memory can be switched on and off in.",
        differences: "They are in the order of their numbers.",
        run: Run::Later(get_memory_blocks),
        ..Command::USUAL
    },
    Command {
        name: "guest-set-memory-blocks",
        role: Some(Role::Power),
        since: "2.3",
        arguments: "mem-blks[{phys-index, online, can-offline?}]",
        returns: "[{phys-index, response (`success`, `not-found`, `operation-not-supported` or `operation-failed`), error-code? (errno)}]",
        class: Class::Control,
        audited: true,
        summary: "Switches blocks of memory on and off.",
        differences: "Nothing is switched unless the whole list is understood.",
        run: Run::Later(set_memory_blocks),
        ..Command::USUAL
    },
];

/// Implements `guest-get-memory-block-info`.
pub fn get_memory_block_info(call: &Call<'_>) -> Outcome {
    #[derive(Serialize)]
    struct Info {
        size: u64,
    }
    call.arguments.none()?;
    Reply::value(&Info { size: memory_blocks::size(&call.context.guest.root)? })
}

/// Implements `guest-get-memory-blocks`.
pub fn get_memory_blocks<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct BlockReply {
        phys_index: u64,
        online: bool,
        can_offline: bool,
    }
    Box::pin(async move {
        call.arguments.none()?;
        let blocks = memory_blocks::list(&call.context.guest).await?;
        let reply =
            |Block { index: phys_index, online, can_offline }| BlockReply { phys_index, online, can_offline };
        Reply::value(&blocks.into_iter().map(reply).collect::<Vec<_>>())
    })
}

/// Implements `guest-set-memory-blocks`.
pub fn set_memory_blocks<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct BlockResponse {
        phys_index: u64,
        response: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        error_code: Option<i32>,
    }
    let reply = |(phys_index, became): (u64, Became)| {
        let (response, error_code) = match became {
            Became::Done => ("success", None),
            Became::Unknown(error) => ("not-found", Some(code(&error))),
            Became::Unsupported(error) => ("operation-not-supported", Some(code(&error))),
            Became::Failed(error) => ("operation-failed", Some(code(&error))),
        };
        BlockResponse { phys_index, response, error_code }
    };
    Box::pin(async move {
        let list = call.arguments.read(|arguments| arguments.required::<Vec<Members<'_>>>("mem-blks"))?;
        let wanted = switched(list, "mem-blks", "phys-index")?;
        call.concerns(in_words(&wanted));
        let became = memory_blocks::set(&call.context.guest, wanted).await;
        Reply::value(&became.into_iter().map(reply).collect::<Vec<_>>())
    })
}

fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_default()
}
