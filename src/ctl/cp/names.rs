//! Names of files in a guest, for the completion in shells.

use crate::copies::paths;
use crate::ctl::Where;
use crate::ctl::door::Door;
use crate::wire::proto::v1::to_reader::Request;
use crate::wire::proto::v1::{FileKind, OpenFiles, ToReader, from_reader::Answer};

/// Limit of the names that are shown.
const MOST: usize = 1000;

/// Lists the paths in the guest of a VM of this host that begin with what was typed; `None` if the guest
/// cannot be reached.
pub async fn entries(place: Where, vm: &str, typed: &[u8]) -> Option<Vec<Vec<u8>>> {
    // Through an API server it takes longer than a user waits after pressing Tab.
    let Where::Here(socket) = place else { return None };
    let begin = typed.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let (directory, unfinished) = typed.split_at(begin);
    let path = if directory.is_empty() { b"/".to_vec() } else { directory.to_vec() };
    let open = OpenFiles { name: vm.to_owned(), path, ..OpenFiles::default() };
    let requests = [Request::Open(open), Request::List(Vec::new())];
    let requests = requests.map(|request| ToReader { request: Some(request) });
    let door = Door::Socket(socket);
    let listed = door.with(async |daemon| {
        let mut found = Vec::new();
        // The call has to stay open until the last request is answered.
        let asked = futures_util::StreamExt::chain(
            tokio_stream::iter(requests.clone()),
            futures_util::stream::pending(),
        );
        let Ok(answers) = daemon.files().read_files(asked).await else { return Ok(found) };
        let mut answers = answers.into_inner();
        while let Ok(Some(answer)) = answers.message().await {
            match answer.answer {
                Some(Answer::Entries(entries)) => found.extend(entries.entries),
                Some(Answer::Done(_) | Answer::Failed(_)) => break,
                _ => {}
            }
            if found.len() > MOST {
                break;
            }
        }
        Ok(found)
    });
    let mut names: Vec<_> = listed
        .await
        .ok()?
        .into_iter()
        .filter(|entry| paths::is_name(&entry.name) && entry.name.starts_with(unfinished))
        // Hidden files are completed as in shells: only after a typed dot.
        .filter(|entry| unfinished.starts_with(b".") || !entry.name.starts_with(b"."))
        .map(|entry| {
            let end: &[u8] = if entry.kind() == FileKind::Directory { b"/" } else { b"" };
            [directory, &entry.name, end].concat()
        })
        .collect();
    names.sort();
    Some(names)
}
