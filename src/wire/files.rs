//! Bounds of the messages of `guestlet.v1.Files`.

/// Bytes of content in one message.
pub const PIECE: usize = 256 << 10;
/// Bytes of one message, with what is around its content.
pub const MAX_MESSAGE: usize = 320 << 10;
