//! Decides from the available evidence which VM holds a volume. Pure, and shared by all backends.
//!
//! ```text
//!                       the VM on record as the holder
//!  reports that it has the volume ───────────────────────────▶ On
//!  is reachable but does not answer ─────────────────────────▶ Unknown
//!  reports that it does not have it, or is absent, or is not in the settings, or no VM is on record:
//!       no process on this machine has the image open ────────────────────────────▶ Off
//!       one does:       another VM reports that it has it ────────────────────────▶ On
//!                       no VM does ───────────────────────────────────────────────▶ Unknown
//!       cannot be determined: the VM is absent or not in the settings, and its process
//!                          is not known to have ended ────────────────────────────▶ Unknown
//!                          otherwise ─────────────────────────────────────────────▶ Off
//! ```

use super::volumes::{Holder, Place};

/// Report of a VM's hypervisor about a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Said {
    /// The VM, whose present name this is, has the volume.
    Has(String),
    /// The VM does not have the volume.
    HasNot,
    /// No hypervisor process is there to be queried.
    Absent {
        /// True if the process that was there before has certainly ended.
        ended: bool,
    },
    /// The hypervisor is there but gives no answer; the text is the reason.
    Silent(String),
    /// The settings list no such VM, or its hypervisor cannot be queried.
    Unlisted,
}

/// Use of a volume's image by processes of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Open {
    /// No process has the image open, or there is no image.
    Nobody,
    /// A process has the image open, and this VM reports that it is its own.
    By(Place),
    /// A process has the image open, but no VM reports the volume; the text names what is open.
    BySomebody(String),
    /// The use of the image cannot be determined; the text is the reason.
    Untold(String),
}

/// Outcome of a decision.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Not decided yet: the caller has to check whether the image is open, and judge again.
    Look,
    /// The final answer.
    Is(Holder),
}

/// Decides which VM holds a volume. `remembered` is the VM on record as the holder, with its hypervisor's
/// report; `open` is the use of the image, or `None` if it has not been checked.
pub fn judge(remembered: Option<(&Place, &Said)>, open: Option<Open>) -> Verdict {
    let has_let_go = match remembered {
        None | Some((_, Said::HasNot | Said::Absent { ended: true })) => true,
        Some((place, Said::Has(vm))) => {
            return Verdict::Is(Holder::On(Place { vm: vm.clone(), ..place.clone() }));
        }
        Some((Place { vm, .. }, Said::Silent(words))) => {
            let why = format!("the VM {vm} may have it, but cannot be asked: {words}");
            return Verdict::Is(Holder::Unknown(why));
        }
        Some((_, Said::Absent { ended: false } | Said::Unlisted)) => false,
    };
    Verdict::Is(match open {
        None => return Verdict::Look,
        Some(Open::Nobody) => Holder::Off,
        Some(Open::By(place)) => Holder::On(place),
        Some(Open::BySomebody(what)) => Holder::Unknown(format!(
            "{what} is open in another program, and none of the VMs that can be asked has it"
        )),
        Some(Open::Untold(_)) if has_let_go => Holder::Off,
        Some(Open::Untold(why)) => {
            Holder::Unknown(format!("the VM that had it cannot be asked, and nothing else can tell: {why}"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_proof_is_off() {
        let place = Place { uuid: "1".into(), vm: "a".into() };
        let somebody = || Open::BySomebody("it".into());
        let untold = || Open::Untold("NFS".into());
        let all = || [Open::Nobody, Open::By(place.clone()), somebody(), untold()];
        for open in all() {
            let is = |said: &Said| judge(Some((&place, said)), Some(open.clone()));
            assert_eq!(
                is(&Said::Has("b".into())),
                Verdict::Is(Holder::On(Place { vm: "b".into(), ..place.clone() }))
            );
            assert!(matches!(is(&Said::Silent("x".into())), Verdict::Is(Holder::Unknown(_))));
            let gone = [Said::HasNot, Said::Absent { ended: true }];
            for absent in gone.iter().chain(&[Said::Absent { ended: false }, Said::Unlisted]) {
                let ended = gone.contains(absent);
                let expected_off = open == Open::Nobody || ended && open == untold();
                assert_eq!(is(absent) == Verdict::Is(Holder::Off), expected_off, "{absent:?} {open:?}");
                assert_eq!(judge(Some((&place, absent)), None), Verdict::Look);
            }
        }
        assert_eq!(judge(None, None), Verdict::Look);
        assert!(matches!(judge(None, Some(somebody())), Verdict::Is(Holder::Unknown(_))));
    }
}
