//! Opening of the two ends of a copy.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::ends::{Answers, Reading, Writing, unexpected};
use super::standard;
use super::state::State;
use super::tree;
use super::trouble::Trouble;
use super::{Job, Place};
use crate::copies::reader::Reader;
use crate::copies::records::{self, Records};
use crate::copies::writer::Writer;
use crate::copies::{Everything, WAITING};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::door::Door;
use crate::sys::blocking;
use crate::wire::proto::v1::{
    FilesOpened, OpenFiles, ToReader, ToWriter, from_reader, from_writer, to_reader, to_writer,
};

/// Timeout for guestlet-host to begin: longer than that of guestlet-host for an agent.
const OPENING: Duration = Duration::from_secs(90);

/// Opens both ends, and makes one pass over everything that is to be copied.
///
/// # Errors
/// Fails if an end breaks.
pub async fn with_both(
    doors: &dyn Fn(&str) -> Door,
    job: &Job,
    source: &Place,
    state: &mut State,
) -> Result<(), Trouble> {
    let [from, to] = [source, &job.destination].map(|place| place.vm().map(doors));
    over(from.as_ref(), async |daemon| {
        let (mut reading, opened) = read(daemon, from.as_ref(), job, source, state).await?;
        let done = over(to.as_ref(), async |daemon| {
            let (mut writing, place) = write(daemon, to.as_ref(), job, state).await?;
            state.was_begun = true;
            // A directory that this pass creates is the target itself for the next pass, which must not copy into it.
            state.is_entry |= !place.last.is_empty();
            tree::copy(&mut reading, &mut writing, &opened, &place, job, source, state).await?;
            writing.end().await;
            Ok(())
        })
        .await;
        if done.is_ok() {
            reading.end().await;
        }
        done
    })
    .await
}

/// Runs `work` over a connection if the end is reached through a door.
async fn over<T>(
    door: Option<&Door>,
    work: impl AsyncFnOnce(Option<Daemon>) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    let Some(door) = door else { return work(None).await };
    let line = door.dial().await.map_err(Trouble::of_dial)?;
    match line.over(async |daemon| Ok(work(Some(daemon)).await)).await {
        Ok(done) => done,
        Err(error) if error.is_of_connection() => Err(Trouble::Lost(error)),
        Err(error) => Err(Trouble::Fatal(error)),
    }
}

async fn read(
    daemon: Option<Daemon>,
    door: Option<&Door>,
    job: &Job,
    source: &Place,
    state: &State,
) -> Result<(Reading, FilesOpened), Trouble> {
    let (say, asked) = mpsc::channel(WAITING);
    let open = OpenFiles {
        name: source.vm().unwrap_or_default().to_owned(),
        path: source.path().to_vec(),
        with_attributes: job.options.attributes,
        ..OpenFiles::default()
    };
    // The channel is empty, so it has room for this message.
    drop(say.try_send(ToReader { request: Some(to_reader::Request::Open(open)) }));
    let answers = if let (Some(daemon), Some(door)) = (daemon, door) {
        let mut client = daemon.files();
        let call = client.read_files(ReceiverStream::new(asked));
        There { name: source.vm().unwrap_or_default(), door }.answers(call).await?
    } else {
        let (tell, answers) = mpsc::channel(WAITING);
        if *source == Place::Standard {
            let input = state.standard_input.clone();
            blocking::let_go(move || standard::read(&input, asked, &tell));
        } else {
            let reader = Reader { guard: Everything, base: PathBuf::from("."), answers: tell };
            blocking::let_go(move || reader.run(asked));
        }
        Answers::Here(answers)
    };
    let mut reading = Reading::new(say, answers);
    match reading.next().await.map_err(fatal)? {
        from_reader::Answer::Opened(opened) => Ok((reading, opened)),
        _ => Err(unexpected()),
    }
}

async fn write(
    daemon: Option<Daemon>,
    door: Option<&Door>,
    job: &Job,
    state: &State,
) -> Result<(Writing, FilesOpened), Trouble> {
    let destination = &job.destination;
    let (say, asked) = mpsc::channel(WAITING);
    let open = OpenFiles {
        name: destination.vm().unwrap_or_default().to_owned(),
        path: destination.path().to_vec(),
        with_attributes: false,
        id: state.id.clone(),
        is_entry: state.is_entry,
    };
    drop(say.try_send(ToWriter { request: Some(to_writer::Request::Open(open)) }));
    let answers = if let (Some(daemon), Some(door)) = (daemon, door) {
        let mut client = daemon.files();
        let call = client.write_files(ReceiverStream::new(asked));
        There { name: destination.vm().unwrap_or_default(), door }.answers(call).await?
    } else {
        let (tell, answers) = mpsc::channel(WAITING);
        if *destination == Place::Standard {
            let output = state.standard_output.clone();
            blocking::let_go(move || standard::write(&output, asked, &tell));
        } else {
            let records = own_records();
            let writer = Writer { guard: Everything, base: PathBuf::from("."), records, answers: tell };
            blocking::let_go(move || {
                let _ = writer.records.purge(std::time::SystemTime::now());
                writer.run(asked);
            });
        }
        Answers::Here(answers)
    };
    let mut writing = Writing::new(say, answers);
    match writing.next().await.map_err(fatal)? {
        from_writer::Answer::Opened(opened) => Ok((writing, opened)),
        _ => Err(unexpected()),
    }
}

fn own_records() -> Records {
    records::of_user(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"))
}

/// Makes an error final: without the opened object nothing can be done.
fn fatal(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Failed(failed) => Trouble::fatal(failed.message),
        other => other,
    }
}

/// Guest of a VM, and the connection path to it.
struct There<'d> {
    name: &'d str,
    door: &'d Door,
}

impl There<'_> {
    async fn answers<A>(
        &self,
        call: impl Future<Output = Result<tonic::Response<tonic::Streaming<A>>, tonic::Status>>,
    ) -> Result<Answers<A>, Trouble> {
        let answered = tokio::time::timeout(OPENING, call).await;
        let answered = answered.map_err(|_| Trouble::Lost(Error::Silent))?;
        let stream = answered.map_err(|status| Trouble::of_call(status, self.name, self.door))?;
        let (name, door) = (self.name.to_owned(), Box::new(self.door.clone()));
        Ok(Answers::There { stream: Box::new(stream.into_inner()), name, door })
    }
}
