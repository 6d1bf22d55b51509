//! The `:authority` of a request, replaced in its header block (HPACK, RFC 7541).
//!
//! Nothing is decoded that need not be: fields are only walked over, and none but the authority's value changes. So
//! that both ends of the connection forget the same fields at the same time, whatever they may still refer to, the value
//! stays as long as it was (RFC 7541, 4.1); an empty one, which clients name by the static table, grows by one byte.
//!
//! An authority whose name a client takes from the dynamic table, with another value, stays as it is: the static table
//! has that name, and encoders look there first.

/// Index of `:authority` in the static table (RFC 7541, appendix A), where its value is empty.
const INDEX: usize = 1;
const NAME: &[u8] = b":authority";
/// [`NAME`] in the Huffman code.
const HUFFMAN_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];
/// Letter that a new value consists of: a valid host name of any length.
const LETTER: u8 = b'x';
/// Bytes of an integer after its prefix; more would be beyond any length here.
const INTEGER_BYTES: usize = 4;

/// `block` with an authority that is a host name, if it has one; nothing if it is no header block.
pub(super) fn replaced(block: &[u8]) -> Option<Vec<u8>> {
    let mut rest = block;
    let mut new = Vec::with_capacity(block.len() + NAME.len());
    while let Some(&first) = rest.first() {
        let field = rest;
        let prefix = match first {
            0x80.. => 7,
            0x40.. => 6,
            0x20.. => 5,
            _ => 4,
        };
        let index = integer(&mut rest, prefix)?;
        if first >= 0x80 && index == INDEX {
            // A literal that is not indexed, of the same name.
            new.push(0x01);
            put(1, &mut new);
            continue;
        }
        // An indexed field or a table size update ends here; a literal continues with its strings.
        let is_literal = !(0x20..0x40).contains(&first) && first < 0x80;
        let is_authority = is_literal
            && match index {
                0 => string(&mut rest)?.is_authority(),
                index => index == INDEX,
            };
        let head = field.len() - rest.len();
        if is_authority {
            let value = string(&mut rest)?;
            new.extend_from_slice(&field[..head]);
            put(value.decoded_len()?.max(1), &mut new);
        } else {
            if is_literal {
                string(&mut rest)?;
            }
            new.extend_from_slice(&field[..field.len() - rest.len()]);
        }
    }
    Some(new)
}

/// Appends a string of that many letters.
fn put(letters: usize, block: &mut Vec<u8>) {
    if letters < 0x7f {
        block.extend(u8::try_from(letters));
    } else {
        block.push(0x7f);
        let mut more = letters - 0x7f;
        while more >= 0x80 {
            block.extend(u8::try_from(more % 0x80).map(|low| low | 0x80));
            more /= 0x80;
        }
        block.extend(u8::try_from(more));
    }
    block.resize(block.len() + letters, LETTER);
}

/// A string as it stands in a block (RFC 7541, 5.2).
struct Text<'a> {
    is_huffman: bool,
    bytes: &'a [u8],
}

impl Text<'_> {
    fn is_authority(&self) -> bool {
        self.bytes == if self.is_huffman { HUFFMAN_NAME } else { NAME }
    }

    fn decoded_len(&self) -> Option<usize> {
        if self.is_huffman { huffman_len(self.bytes) } else { Some(self.bytes.len()) }
    }
}

/// Takes a string from the beginning of `rest`.
fn string<'a>(rest: &mut &'a [u8]) -> Option<Text<'a>> {
    let is_huffman = rest.first()? & 0x80 != 0;
    let len = integer(rest, 7)?;
    let (bytes, after) = rest.split_at_checked(len)?;
    *rest = after;
    Some(Text { is_huffman, bytes })
}

/// Takes an integer whose first byte has so many bits of it (RFC 7541, 5.1).
fn integer(rest: &mut &[u8], prefix: u32) -> Option<usize> {
    let (&first, mut after) = rest.split_first()?;
    let all = (1_usize << prefix) - 1;
    let mut value = usize::from(first) & all;
    if value == all {
        let len = after.iter().take(INTEGER_BYTES).position(|byte| byte & 0x80 == 0)? + 1;
        let (bytes, left) = after.split_at(len);
        for (at, byte) in bytes.iter().enumerate() {
            value += usize::from(byte & 0x7f) << (7 * at);
        }
        after = left;
    }
    *rest = after;
    Some(value)
}

/// Numbers of codes per code length, as pairs of length in bits and count (RFC 7541, appendix B). The code is
/// canonical: codes of one length are consecutive, and begin where the shorter ones end. The last of the
/// longest codes marks the end of the string.
const CODES: [(u32, u32); 21] = [
    (5, 10),
    (6, 26),
    (7, 32),
    (8, 6),
    (10, 5),
    (11, 3),
    (12, 2),
    (13, 6),
    (14, 2),
    (15, 3),
    (19, 3),
    (20, 8),
    (21, 13),
    (22, 26),
    (23, 29),
    (24, 12),
    (25, 4),
    (26, 15),
    (27, 19),
    (28, 29),
    (30, 3),
];

/// The bytes that a string in the Huffman code has when it is decoded; nothing if it is not of that code.
fn huffman_len(bytes: &[u8]) -> Option<usize> {
    let mut bits = bytes.iter().flat_map(|byte| (0..8).rev().map(move |at| u32::from(byte >> at & 1)));
    let mut len = 0;
    loop {
        let (mut code, mut taken, mut first) = (0_u32, 0, 0);
        let is_symbol = 'symbol: {
            for (of, count) in CODES {
                first <<= of - taken;
                while taken < of {
                    let Some(bit) = bits.next() else {
                        // The last byte is padded with the beginning of the end code, which is all ones.
                        return (taken < 8 && code == (1 << taken) - 1).then_some(len);
                    };
                    code = code << 1 | bit;
                    taken += 1;
                }
                if code - first < count {
                    break 'symbol true;
                }
                first += count;
            }
            false
        };
        if !is_symbol {
            return None;
        }
        len += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 7541, C.3.1 and C.4.1: the same request, raw and in the Huffman code.
    const RAW: &[u8] = b"\x82\x86\x84\x41\x0fwww.example.com";
    const HUFFMAN: &[u8] = b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff";
    const LETTERS: &[u8] = b"\x82\x86\x84\x41\x0fxxxxxxxxxxxxxxx";

    #[test]
    fn the_value_keeps_its_length() {
        assert_eq!(replaced(RAW).unwrap(), LETTERS);
        assert_eq!(replaced(HUFFMAN).unwrap(), LETTERS);
    }

    #[test]
    fn however_it_is_named_and_indexed() {
        let raw = [b"\x40\x0a".as_slice(), NAME, b"\x03a/b"].concat();
        assert_eq!(replaced(&raw).unwrap(), [b"\x40\x0a".as_slice(), NAME, b"\x03xxx"].concat());
        let huffman = [b"\x10\x88".as_slice(), HUFFMAN_NAME, b"\x03a/b"].concat();
        assert_eq!(replaced(&huffman).unwrap(), [b"\x10\x88".as_slice(), HUFFMAN_NAME, b"\x03xxx"].concat());
        assert_eq!(replaced(b"\x01\x03a/b\x82").unwrap(), b"\x01\x03xxx\x82");
        assert_eq!(replaced(b"\x11\x00").unwrap(), b"\x11\x01x", "an empty one");
        assert_eq!(replaced(b"\x81\x84").unwrap(), b"\x01\x01x\x84", "that of the static table");
        let long = [b"\x01\x7f\x81\x01".as_slice(), &[b'/'; 256]].concat();
        assert_eq!(replaced(&long).unwrap(), [b"\x01\x7f\x81\x01".as_slice(), &[b'x'; 256]].concat());
    }

    #[test]
    fn nothing_else_changes() {
        let block = b"\x3f\xe1\x1f\x82\x04\x02/x\x40\x02te\x08trailers\xbe\x0f\x0f\x01y\x20";
        assert_eq!(replaced(block).unwrap(), block);
    }

    #[test]
    fn what_is_no_block() {
        for (block, what) in [
            (b"\x01".as_slice(), "a value that is missing"),
            (b"\x41\x05abc", "one that is cut"),
            (b"\x00\x02t", "a name that is cut"),
            (b"\xff\xff\xff\xff\xff\x01", "an integer without end"),
            (b"\xff", "an integer that is cut"),
            (b"\x01\x84\xff\xff\xff\xff", "the end of the string within it"),
            (b"\x01\x81\x00", "more than half a symbol left, and not of ones"),
        ] {
            assert_eq!(replaced(block), None, "{what}");
        }
    }

    #[test]
    fn the_code_is_whole() {
        let space: u64 = CODES.iter().map(|&(bits, count)| u64::from(count) << (30 - bits)).sum();
        assert_eq!(space + 1, 1 << 30, "all codes together, with the end's");
        assert_eq!(CODES.iter().map(|&(_, count)| count).sum::<u32>(), 256);
        assert_eq!(huffman_len(HUFFMAN_NAME), Some(NAME.len()));
    }

    proptest! {
        #[test]
        fn any_bytes(block: Vec<u8>) {
            if let Some(new) = replaced(&block) {
                let again = replaced(&new);
                prop_assert_eq!(again.as_deref(), Some(&*new), "what is replaced stays");
            }
        }

        #[test]
        fn integers_come_back(letters in 0..40_000_usize) {
            let mut block = Vec::new();
            put(letters, &mut block);
            let mut rest = block.as_slice();
            let text = string(&mut rest).unwrap();
            prop_assert_eq!((text.bytes.len(), rest.len()), (letters, 0));
        }
    }
}
