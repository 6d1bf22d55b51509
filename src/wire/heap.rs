//! Heap memory of a decoded message, in addition to the size of its type. Pure.
//!
//! The length on the wire says little about it: an empty submessage has two bytes there, and may take a
//! hundred in memory.

use std::collections::HashMap;

use super::messages::{event_kinds, messages};
use super::proto::v1::{self, event::Kind};

/// Overhead of the allocator for each allocation, in bytes.
const PIECE: usize = 16;

/// Memory beside a value's own.
pub trait Heap {
    /// Returns the heap memory of the value in bytes.
    fn heap(&self) -> usize;
}

impl Heap for String {
    fn heap(&self) -> usize {
        self.capacity() + PIECE
    }
}

impl<T: Heap> Heap for Box<T> {
    fn heap(&self) -> usize {
        size_of::<T>() + PIECE + T::heap(self)
    }
}

impl<T: Heap> Heap for Vec<T> {
    fn heap(&self) -> usize {
        self.capacity() * size_of::<T>() + PIECE + self.iter().map(Heap::heap).sum::<usize>()
    }
}

impl<T: Heap> Heap for Option<T> {
    fn heap(&self) -> usize {
        self.as_ref().map_or(0, Heap::heap)
    }
}

#[allow(clippy::implicit_hasher, reason = "messages have no others")]
impl Heap for HashMap<String, String> {
    fn heap(&self) -> usize {
        // A table has room for a seventh more, and a byte for each place; it doubles.
        let places = self.capacity() * 8 / 7 + PIECE;
        let words: usize = self.iter().map(|(key, value)| key.heap() + value.heap()).sum();
        places * (2 * size_of::<String>() + 1) + words
    }
}

macro_rules! of_messages {
    ($($message:ident { $($field:ident: $kind:ident ($inner:ident, $list:ident) = $number:literal;)* })*) => {
        $(impl Heap for v1::$message {
            fn heap(&self) -> usize {
                0 $(+ self.$field.heap())*
            }
        })*
    };
}

messages!(of_messages);

macro_rules! of_events {
    ($($message:ident $name:literal = $number:literal;)*) => {
        impl Heap for Kind {
            fn heap(&self) -> usize {
                match self {
                    $(Kind::$message(event) => event.heap(),)*
                }
            }
        }
    };
}

event_kinds!(of_events);

/// Returns the memory of one list entry, where the list may have capacity for twice as many.
pub fn entry<T: Heap>(entry: &T) -> usize {
    2 * size_of::<T>() + entry.heap()
}
