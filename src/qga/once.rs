//! Single command that a host half sends on its session, within the rights of that host half and its caller. There
//! is no queue: nothing waits for its turn, and the command is cancelled when the caller disconnects.

use futures_util::StreamExt as _;

use crate::policy::Asker;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::reply::Line;
use crate::qga::request::Request;
use crate::qga::{Context, command, reply};
use crate::sys::blocking;
use crate::wire::qga::{Decoder, Frame};

/// Maximum size of an answer in bytes: a host half accepts no more from a guest at once.
const MOST: usize = 192 << 10;
/// Number of blocking operations under way, of all callers, above which no command is begun: more means that disks
/// hang.
const MAX_WORK: usize = 128;

/// Carries out the command in `message`, and returns the line that qemu-ga would answer; empty if it would not
/// answer.
pub async fn answer(context: &Context, message: Vec<u8>, asker: &Asker) -> Vec<u8> {
    let mut decoder = Decoder::new();
    *decoder.input() = message;
    // The decoder recognizes the end of a message at the byte that follows it.
    decoder.input().push(b'\n');
    let message = match decoder.next() {
        Some(Frame::Message(message)) => message.into_owned(),
        Some(Frame::Malformed(why)) => return failed(why.into(), None),
        None => return failed(Error::generic("invalid request: it is empty, or has no end"), None),
    };
    if decoder.next().is_some() || decoder.is_partial() {
        return failed(Error::generic("invalid request: there is more than one command"), None);
    }
    let request = match Request::parse(&message) {
        Ok(request) => request,
        Err(error) => return failed(error, None),
    };
    let line = carry_out(context, &request, asker).await;
    let line = match line {
        Ok(line) => whole(line).await,
        Err(error) => Err(error),
    };
    line.unwrap_or_else(|error| failed(error, request.id()))
}

fn failed(error: Error, id: Option<&str>) -> Vec<u8> {
    reply::line(Err(error), id).text
}

async fn carry_out(context: &Context, request: &Request<'_>, asker: &Asker) -> Result<Line, Error> {
    let peer = asker.to_string();
    let (command, arguments) = command(request, context, asker).inspect_err(|_| {
        if let Ok((name, _)) = request.call() {
            context.write_down_refusal(&name, &peer, asker);
        }
    })?;
    if !command.always {
        context.room.may_wait(command.name)?;
        if blocking::under_way() >= MAX_WORK {
            let text = format!(
                "{MAX_WORK} operations are under way, which is the limit: disks or other resources do not answer"
            );
            return Err(Error::generic(text));
        }
    }
    let call = Call::new(context, arguments, &peer, asker);
    Ok(call.carry_out(command, request.id()).await)
}

/// Collects all parts of a line, if it is not too long.
async fn whole(line: Line) -> Result<Vec<u8>, Error> {
    let Line { mut text, rest } = line;
    if let Some((mut parts, last)) = rest {
        while text.len() <= MOST
            && let Some(part) = parts.next().await
        {
            text.extend_from_slice(&part);
        }
        text.extend_from_slice(&last);
    }
    if text.len() > MOST {
        let text = format!("the answer has more than {} KiB, which is the limit of a session", MOST >> 10);
        return Err(Error::generic(text));
    }
    Ok(text)
}
