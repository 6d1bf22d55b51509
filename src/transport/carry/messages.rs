//! Messages about a connection, in either direction of `guestlet.v1.Forward`.

use super::Said;
use crate::wire::proto::v1;

macro_rules! messages {
    ($($direction:ident),*) => {$(
        impl From<(u32, Said)> for v1::$direction::Message {
            /// Converts when the message is sent, and not before, because this drops the room that the data takes in the
            /// outbox.
            fn from((number, said): (u32, Said)) -> Self {
                match said {
                    Said::Data(data, _room) => Self::Data(v1::ForwardData { number, data }),
                    Said::Credit(bytes) => Self::Credit(v1::ForwardCredit { number, bytes }),
                    Said::End => Self::End(number),
                    Said::Reset(reason) => Self::Reset(v1::ForwardReset { number, reason }),
                }
            }
        }
    )*};
}

messages!(to_target, from_target);
