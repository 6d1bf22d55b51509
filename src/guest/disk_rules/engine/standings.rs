//! Publishes the state of each rule.

use std::sync::Arc;

use super::Engine;
use crate::guest::disk_rules::find::{Device, Verdict};
use crate::guest::disk_rules::plan::{Finding, Plan, View};
use crate::guest::disk_rules::rule::Rule;
use crate::guest::disk_rules::{Standing, Told};

impl Engine {
    pub(super) fn standings(&self, rules: &[Rule], plan: &Plan, view: &View) -> Vec<Standing> {
        let mut list: Vec<_> = (rules.iter().zip(&plan.findings).zip(&plan.verdicts))
            .map(|((rule, finding), verdicts)| self.standing(rule, finding, verdicts, view))
            .collect();
        for seen in &view.made {
            let point = &seen.made.how.mount_point;
            if rules.iter().any(|rule| rule.how.mount_point == *point) {
                continue;
            }
            let why = self.stuck.get(point).map(|(_, why)| why.clone());
            list.push(Standing {
                mount_point: point.clone(),
                state: if why.is_some() { "failed" } else { "working" },
                disk: Some(seen.made.disk.name.clone()),
                file: Some(seen.made.file.clone()),
                reason: why.unwrap_or_else(|| "no rule wants it any more".to_owned()),
                ..Standing::default()
            });
        }
        list
    }

    fn standing(&self, rule: &Rule, finding: &Finding, verdicts: &[Verdict], view: &View) -> Standing {
        let point = &rule.how.mount_point;
        let tried = self.tried.get(point);
        let (state, device, reason) = match finding {
            Finding::NoDisk(why) => ("no-disk", None, why.clone()),
            Finding::Several(why) => ("ambiguous", None, why.clone()),
            Finding::Waits(disk, why) => match self.stuck.get(point) {
                Some((_, stuck)) => ("failed", Some(Device::whole(disk)), stuck.clone()),
                None => ("waiting", Some(Device::whole(disk)), why.clone()),
            },
            Finding::LetGo(device) => {
                let why = "it was unmounted by hand; it will be mounted again when the disk is plugged in \
                           again, or when the rules are rewritten";
                ("unmounted", Some(device.clone()), why.to_owned())
            }
            Finding::Done(device) => {
                let remark = tried.and_then(|tried| tried.outcome.as_ref().ok()?.remark.clone());
                ("mounted", Some(device.clone()), remark.unwrap_or_default())
            }
            Finding::Apply(device) => {
                let tried = tried.filter(|_| !self.is_busy(Some(point), None));
                let (state, reason) = match tried.map(|tried| &tried.outcome) {
                    None => ("working", String::new()),
                    Some(Ok(applied)) if applied.foreign => {
                        let foreign = "it was already mounted like this".to_owned();
                        ("mounted", applied.remark.clone().unwrap_or(foreign))
                    }
                    Some(Ok(applied)) => ("mounted", applied.remark.clone().unwrap_or_default()),
                    Some(Err(why)) => ("failed", why.clone()),
                };
                (state, Some(device.clone()), reason)
            }
        };
        let others = view.disks.iter().zip(verdicts).filter_map(|(disk, verdict)| match verdict {
            Verdict::Not(why) | Verdict::Unknown(why) => Some((disk.name.clone(), why.clone())),
            Verdict::Fits(_) => None,
        });
        Standing {
            origin: rule.origin.clone(),
            wanted: rule.matcher.to_string(),
            mount_point: point.clone(),
            state,
            disk: device.as_ref().map(|device| device.disk.name.clone()),
            file: device.map(|device| device.file),
            reason,
            others: others.collect(),
        }
    }

    pub(super) fn tell(&self, told: Told) {
        self.guest.disk_rules.told.send_if_modified(|known| {
            let changed = **known != told;
            if changed {
                for now in told.rules.iter().filter(|now| ["ambiguous", "waiting"].contains(&now.state)) {
                    if !known.rules.iter().any(|before| before.reason == now.reason) {
                        tracing::warn!("{}: {}: {}", now.origin, now.mount_point.display(), now.reason);
                    }
                }
                *known = Arc::new(told);
            }
            changed
        });
    }
}
