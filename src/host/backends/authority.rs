//! From what is heard of a volume to who holds it. Pure, and the same for every backend.
//!
//! ```text
//!                       the VM that is remembered to have it
//!  says that it has ─────────────────────────────────────────▶ On
//!  is there and does not say it ─────────────────────────────▶ Unknown
//!  says that it has it not, or is not there, or is not in the settings, or nobody is remembered:
//!       nobody on this machine has the image open ────────────────────────────────▶ Off
//!       somebody has: another VM says that it is that one ────────────────────────▶ On
//!                     no VM does ─────────────────────────────────────────────────▶ Unknown
//!       it cannot be told: the VM is not there or in no settings, and its process is
//!                          not known to have ended ───────────────────────────────▶ Unknown
//!                          otherwise ─────────────────────────────────────────────▶ Off
//! ```

use super::volumes::{Holder, Place};

/// What the hypervisor of a VM says of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Said {
    /// It has it, in the VM of this name.
    Has(String),
    /// It has it not.
    HasNot,
    /// Nobody is there who could be asked.
    Absent {
        /// The process that was there before has ended, for certain.
        ended: bool,
    },
    /// It is there, and does not say it; in words why.
    Silent(String),
    /// There is no such VM in the settings, or none that can be asked.
    Unlisted,
}

/// Whether somebody has a volume's image open.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Open {
    /// Nobody has, or there is no image.
    Nobody,
    /// This VM says that it is the one that has.
    By(Place),
    /// Somebody has, and no VM says that it is the one; in words what is open.
    BySomebody(String),
    /// It cannot be told; in words why.
    Untold(String),
}

/// What follows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It has to be looked whether somebody has the image open.
    Look,
    /// This.
    Is(Holder),
}

/// Who holds a volume, as said by the VM that is remembered to have it, if one is, with its UUID and name; and by the image,
/// as far as it was looked at.
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
