//! `guestctl receipts`: evidence of the consistency of snapshots that were taken while a guest's file systems
//! were frozen.

use serde::Serialize;

use super::restore::{self, Mark, Trial};
use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::json::rfc3339;
use crate::ctl::print::Printer;
use crate::receipt::envelope::{Check, open};
use crate::receipt::{Receipt, show};
use crate::text;
use crate::wire::proto::v1::{GetReceiptRequest, GetReceiptResponse, ListReceiptsRequest};

/// Operation on receipts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// List the latest receipts.
    List {
        /// Number of the latest receipts to list.
        last: u32,
    },
    /// Show the receipt with this identifier.
    Show(String),
    /// Verify the guest's signature of the receipt.
    Verify(String),
    /// Start a clone from the receipt's snapshot, and compare.
    Restore(String, Trial),
}

/// Entry of the list, for programs.
#[derive(Debug, Serialize)]
struct Listed {
    id: String,
    kept: Option<String>,
    level: String,
    end: String,
    caller: String,
    verdict: String,
}

/// Receipt for programs.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    receipt: &'a Receipt,
    verdict: &'a str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    restored: Option<&'a Mark>,
}

/// Result of a verification, for programs.
#[derive(Debug, Serialize)]
struct Verified<'a> {
    id: &'a str,
    level: &'a str,
    verdict: &'a str,
    good: bool,
    detail: &'a str,
}

/// Carries out an operation on receipts.
///
/// # Errors
/// Fails if the guest cannot be reached, does not have the receipt, or the signature is not valid.
pub async fn run(daemon: &Daemon, printer: &mut Printer, name: String, wish: Wish) -> Result<(), Error> {
    match wish {
        Wish::List { last } => list(daemon, printer, name, last).await,
        Wish::Show(id) => show(printer, &get(daemon, name, id).await?),
        Wish::Verify(id) => verify(printer, &get(daemon, name, id).await?),
        Wish::Restore(id, trial) => restore(printer, &get(daemon, name, id).await?, &trial).await,
    }
}

async fn list(daemon: &Daemon, printer: &mut Printer, name: String, last: u32) -> Result<(), Error> {
    let request = ListReceiptsRequest { name: name.clone(), last };
    let found = answer(daemon.freeze().list_receipts(request), &name, SOON).await?;
    if found.older > 0 {
        printer.note(&format!("{} older receipts are not shown; use --last", found.older));
    }
    let listed = found.receipts.into_iter().map(|one| Listed {
        id: one.id,
        kept: one.kept.map(rfc3339),
        level: one.level,
        end: one.end,
        caller: one.caller,
        verdict: one.verdict,
    });
    let listed: Vec<_> = listed.collect();
    let table = || {
        let mut rows = vec![["ID", "KEPT", "LEVEL", "ENDED", "SIGNATURE", "FOR"].map(str::to_owned)];
        rows.extend(listed.iter().map(|one| {
            let kept = one.kept.clone().unwrap_or_default();
            [&one.id, &kept, &one.level, &one.end, &one.verdict, &one.caller].map(|cell| text::or_dash(cell))
        }));
        text::table(&rows)
    };
    Ok(printer.value(&listed, table)?)
}

/// Receipt with guestlet-host's assessment of it.
struct Got {
    receipt: Option<Receipt>,
    answer: GetReceiptResponse,
}

async fn get(daemon: &Daemon, name: String, id: String) -> Result<Got, Error> {
    let request = GetReceiptRequest { name: name.clone(), id };
    let answer = answer(daemon.freeze().get_receipt(request), &name, SOON).await?;
    // guestlet-host has checked the signature.
    let receipt = open(&answer.envelope, None, |_, _, _| Check::Bad).receipt;
    Ok(Got { receipt, answer })
}

fn show(printer: &mut Printer, got: &Got) -> Result<(), Error> {
    let GetReceiptResponse { verdict, detail, .. } = &got.answer;
    let Some(receipt) = &got.receipt else { return Err(Error::Unmet(format!("the receipt is {detail}"))) };
    let mark = Mark::of(&receipt.id);
    let restored = mark.as_ref();
    let words = || {
        let restored = restored.map(|mark| format!("{}\n", mark.words())).unwrap_or_default();
        show::words(receipt, detail) + &restored
    };
    Ok(printer.value(&Shown { receipt, verdict, detail, restored }, words)?)
}

/// Carries out a restore test. An altered receipt is refused. An unsigned one is tested, and the mark records
/// that.
async fn restore(printer: &mut Printer, got: &Got, trial: &Trial) -> Result<(), Error> {
    let GetReceiptResponse { verdict, detail, .. } = &got.answer;
    let receipt = got.receipt.as_ref().filter(|_| matches!(&**verdict, "signed" | "unsigned"));
    let Some(receipt) = receipt else {
        return Err(Error::Unmet(format!("not verified: the receipt is {detail}")));
    };
    let mark = restore::run(printer, receipt, verdict, trial).await?;
    let words = || {
        let compared = mark.compared.iter().map(|line| format!("{line}\n"));
        compared.collect::<String>() + &format!("{}: {}\n", mark.id, mark.words())
    };
    Ok(printer.value(&mark, words)?)
}

fn verify(printer: &mut Printer, got: &Got) -> Result<(), Error> {
    let GetReceiptResponse { verdict, detail, .. } = &got.answer;
    let good = verdict == "signed";
    let (id, level) = got.receipt.as_ref().map_or(("", ""), |receipt| (&*receipt.id, receipt.level.word()));
    let words = || if id.is_empty() { format!("{detail}\n") } else { format!("{id}: {level}\n{detail}\n") };
    printer.value(&Verified { id, level, verdict, good, detail }, words)?;
    if good {
        Ok(())
    } else {
        Err(Error::Unmet("there is no proof that the guest made this receipt".to_owned()))
    }
}
