//! A pool of each host that hangs and goes on, and what of its volumes was begun and not finished.

use tonic::{Code, Status};

use super::super::Asking;
use super::{Begun, CLASSES, HUNG, MIB, Made, Vm, World};

impl World {
    /// Makes a volume, or notes that it may be there.
    pub fn make(&mut self, asking: &Asking, begun: Begun) -> Result<String, Status> {
        match asking.create_in(&begun.name, 12 * MIB, Some(begun.class)) {
            Ok(volume) => {
                let Begun { host, cluster, .. } = begun;
                let (id, bytes) = (volume.volume_id, volume.capacity_bytes);
                let made = Made { id: id.clone(), host, cluster, bytes, node: None, is_doubtful: false };
                assert!(self.kept(&made).exists(), "{made:?} is not there");
                self.mark(&made);
                self.made.insert(id.clone(), made);
                Ok(id)
            }
            Err(status) => {
                self.begun.push(begun);
                Err(status)
            }
        }
    }

    /// While a pool of this host hangs, the others do what is asked of them.
    fn others_go_on(&mut self, host: usize) {
        let hung = self.pools(host).join(HUNG);
        let is_free = |vm: &Vm| {
            vm.host == host
                && vm.may_ask()
                && vm.asked().is_some_and(|qemu| qemu.open_below(&hung).is_empty())
        };
        let Some(free) = self.vms.iter().find(|vm| is_free(vm)) else { return };
        free.asked().unwrap().ask("cont");
        self.hosts[host].until_vm(&free.name, |seen| seen["power"] == "running");
        let (asking, name) = (free.asking(), format!("w{}", self.names));
        self.names += 1;
        for class in CLASSES.into_iter().filter(|class| *class != HUNG) {
            let done = "what another pool hinders nobody from";
            let id =
                asking.create_in(&format!("{name}-{class}"), 12 * MIB, Some(class)).expect(done).volume_id;
            asking.publish(&id, &free.name).expect(done);
            asking.expand(&id, 14 * MIB).expect(done);
            asking.unpublish(&id, &free.name).expect(done);
            asking.delete(&id).expect(done);
        }
        let refused = asking.create_in(&format!("{name}-{HUNG}"), 12 * MIB, Some(HUNG)).unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        let cluster = free.cluster;
        self.begun.push(Begun { name: format!("{name}-{HUNG}"), class: HUNG, host, cluster });
    }

    /// A pool hangs, or goes on.
    pub fn hang(&mut self, host: usize) -> String {
        let hangs = !self.mirrors[host].hangs();
        self.mirrors[host].hang(hangs);
        if hangs {
            self.others_go_on(host);
        }
        self.settle();
        format!("the pool {HUNG} of host {host} {}", if hangs { "hangs" } else { "goes on" })
    }

    /// Asks again for what could not be made, as the cluster does, and has it then.
    pub fn repeat(&mut self) {
        for begun in std::mem::take(&mut self.begun) {
            let of = |vm: &&Vm| (vm.host, vm.cluster) == (begun.host, begun.cluster);
            let asking = self.vms.iter().find(of).unwrap().asking();
            let again = || asking.create_in(&begun.name, 12 * MIB, Some(begun.class));
            self.hosts[begun.host].until("a volume is made after all", || again().is_ok());
            self.make(&asking, begun).unwrap();
        }
    }
}
