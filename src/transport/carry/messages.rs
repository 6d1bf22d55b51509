//! What is said of a connection, as a message of either direction of `guestlet.v1.Forward`.

use super::Said;
use crate::wire::proto::v1;

macro_rules! messages {
    ($($direction:ident),*) => {$(
        impl From<(u32, Said)> for v1::$direction::Message {
            /// The place of a part among those that wait is free with this: whoever sends the message makes it, and nobody before.
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
