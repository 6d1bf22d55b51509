//! Notifications to the service manager, `sd_notify(3)`. They have no effect without one (no
//! `$NOTIFY_SOCKET`).

use sd_notify::NotifyState;

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot notify the service manager: {error}");
    }
}

/// The service is up.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// One line for `systemctl status`.
pub fn status(status: &str) {
    notify(&[NotifyState::Status(status)]);
}

/// The service is alive; due at least every [`sd_notify::watchdog_enabled`] period.
pub fn alive() {
    notify(&[NotifyState::Watchdog]);
}

/// The service will end no later than this, however long ending usually takes.
pub fn extend_stop(longest: std::time::Duration) {
    let microseconds = u32::try_from(longest.as_micros()).unwrap_or(u32::MAX);
    notify(&[NotifyState::ExtendTimeoutUsec(microseconds), NotifyState::Status("Stopping after the thaw")]);
}

/// Notifies the service manager that the service is stopping.
pub fn stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("Stopping")]);
}
