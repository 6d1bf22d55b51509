//! Mapping of errors to the status codes of CSI.

use tonic::{Code, Status};

use crate::guest::pod_volumes::Error;
use crate::guest::volumes;
use crate::sys::error_chain;

/// Returns the status for a required field that is missing.
pub fn missing(field: &'static str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

/// Returns the status for an error of a volume.
pub fn of(error: &Error) -> Status {
    let code = match error {
        Error::Busy { .. } => Code::Aborted,
        Error::NoKubelet | Error::Frozen(_) | Error::NoServer { .. } => Code::Unavailable,
        Error::Silent { .. } => Code::DeadlineExceeded,
        Error::Path { .. } | Error::Unusable(_) => Code::InvalidArgument,
        Error::NoDisk { .. } | Error::NotThere(_) => Code::NotFound,
        Error::NoFolder(_)
        | Error::Ambiguous { .. }
        | Error::Unsure { .. }
        | Error::Gone(_)
        | Error::NotStaged { .. }
        | Error::NoNfs
        | Error::Taken(_)
        | Error::ReadOnly(_) => Code::FailedPrecondition,
        Error::Otherwise { .. } => Code::AlreadyExists,
        Error::Range(_) => Code::OutOfRange,
        Error::NotGrown(_) | Error::System { .. } => Code::Internal,
        Error::Volume(error) => of_disk(error),
    };
    Status::new(code, error_chain::words(error))
}

fn of_disk(error: &volumes::Error) -> Code {
    use volumes::Error as E;

    match error {
        E::Busy { .. } | E::Locked { .. } => Code::Aborted,
        E::Silent { .. } => Code::DeadlineExceeded,
        // The next call looks it up again.
        E::Another { .. } => Code::Unavailable,
        E::Otherwise { .. } => Code::AlreadyExists,
        E::Wrong { .. } | E::NotText { .. } => Code::InvalidArgument,
        E::InUse { .. }
        | E::Claimed { .. }
        | E::NotBlank { .. }
        | E::NoFileSystem { .. }
        | E::Damaged { .. }
        | E::Copy { .. }
        | E::ReadOnly { .. }
        | E::Empty { .. }
        | E::Target { .. }
        | E::NotInstalled { .. } => Code::FailedPrecondition,
        E::Unreadable { .. }
        | E::NotMade { .. }
        | E::Unfinished { .. }
        | E::Note { .. }
        | E::Mount { .. }
        | E::Unmount { .. }
        | E::Swap { .. }
        | E::Trim { .. }
        | E::Program(_) => Code::Internal,
    }
}
