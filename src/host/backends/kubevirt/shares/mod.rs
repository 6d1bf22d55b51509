//! Shares on Harvester: a claim of volume mode `Filesystem` is served by an NFS server of Harvester's storage
//! as long as an object of the kind NetworkFilesystem requests it. Guests reach it over the network; KubeVirt
//! is not involved.
//!
//! ```text
//!  claim                                     NetworkFilesystem (namespace harvester-system, named as the PersistentVolume)
//!    guestlet.io/shared-with: [a, b]           spec.desiredState: Enabled     status.state: Enabled, status.endpoint: ADDRESS
//!    no VM left                                spec.desiredState: Disabled    status.state: Disabled
//!    deleted                                   deleted before it
//! ```
//!
//! The claim records the VMs that may mount a share, and is written before the object is changed. Two programs
//! may be working on a share at once, if a former leader does not know yet that it has been replaced. Therefore
//! **to end a share, a program reads the object first and then the claim; to serve it, a program writes the
//! claim first and then the object**, each time with a new value (an annotation with the claim's version), and
//! both write the object only if it is unchanged since they read it. So the program that ends a share either
//! sees the VM in the claim, or its write is refused.
//!
//! `object` decides the next step for an object, `requests` contains the requests to the API server, `sharing`
//! carries out the steps, and `upkeep` checks periodically that they were done.

mod object;
mod requests;
mod sharing;
mod upkeep;

pub use upkeep::Upkeep;
