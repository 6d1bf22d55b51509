//! Events about network interfaces and their addresses.

use super::Happening;
use super::state::{Change, Excess};
use crate::text;
use crate::wire::heap;
use crate::wire::proto::v1::{InterfacesChanged, NetworkInterface};

impl Happening for InterfacesChanged {
    fn words(&self) -> String {
        let interfaces: Vec<_> = self.interfaces.iter().map(words).collect();
        format!("interfaces changed: {}", text::or_dash(&interfaces.join("; ")))
    }

    fn apply(&self, change: &mut Change<'_>) -> Result<(), Excess> {
        change.check_interfaces(&self.interfaces)?;
        let (state, cut, room) = change.parts();
        room.give_back(state.interfaces.iter().map(heap::entry).sum());
        state.interfaces.clone_from(&self.interfaces);
        cut.interfaces = room.keep(&mut state.interfaces);
        Ok(())
    }

    fn slim(&mut self, most: usize) {
        let mut left = most;
        self.interfaces.retain(|interface| {
            let fits = left.checked_sub(heap::entry(interface));
            left = fits.unwrap_or(left);
            fits.is_some()
        });
        self.interfaces.shrink_to_fit();
    }
}

/// Describes an interface, for example `eth0 192.0.2.7/24 fe80::1/64`.
pub fn words(interface: &NetworkInterface) -> String {
    let mut words = vec![interface.name.as_str()];
    words.extend(interface.addresses.iter().map(String::as_str));
    if !interface.running {
        words.push("(down)");
    }
    words.join(" ")
}
