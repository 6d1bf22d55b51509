//! The guestlet API's services in the guest, one file per service.

pub mod guest;
