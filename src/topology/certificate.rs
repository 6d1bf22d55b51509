//! What of a certificate (RFC 5280) says whose it is and when it is good. Pure.
//!
//! Whether it is genuine is the API server's question; this only reads the kubelet's own.

/// The object identifier of a common name, 2.5.4.3.
const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// The version, which old certificates lack.
const VERSION: u8 = 0xa0;

/// Whose it is, and when it is good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The common name of the subject.
    pub common_name: String,
    /// Seconds since 1970.
    pub not_before: i64,
    /// Seconds since 1970.
    pub not_after: i64,
}

/// Reads a certificate in DER; none if it is none, or has no common name.
pub fn parse(der: &[u8]) -> Option<Certificate> {
    let mut to_be_signed = inside(inside(der, SEQUENCE)?, SEQUENCE)?;
    if to_be_signed.first() == Some(&VERSION) {
        next(&mut to_be_signed)?;
    }
    let (_serial, _algorithm, _issuer) =
        (next(&mut to_be_signed)?, next(&mut to_be_signed)?, next(&mut to_be_signed)?);
    let (_, mut validity) = next(&mut to_be_signed)?;
    let (_, mut subject) = next(&mut to_be_signed)?;
    let (not_before, not_after) = (time(next(&mut validity)?)?, time(next(&mut validity)?)?);
    while !subject.is_empty() {
        let (tag, mut set) = next(&mut subject)?;
        while tag == SET && !set.is_empty() {
            let (_, mut attribute) = next(&mut set)?;
            let (kind, value) = (next(&mut attribute)?, next(&mut attribute)?);
            if kind == (OBJECT_IDENTIFIER, &COMMON_NAME) {
                let common_name = std::str::from_utf8(value.1).ok()?.to_owned();
                return Some(Certificate { common_name, not_before, not_after });
            }
        }
    }
    None
}

/// What is inside of the one element of this kind that `bytes` begins with.
fn inside(mut bytes: &[u8], kind: u8) -> Option<&[u8]> {
    next(&mut bytes).filter(|(tag, _)| *tag == kind).map(|(_, inside)| inside)
}

/// Takes one element off: its kind, and what is inside.
fn next<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (tag, rest) = bytes.split_first()?;
    let (length, rest) = rest.split_first()?;
    let (length, rest) = match usize::from(*length) {
        short @ 0..0x80 => (short, rest),
        long => {
            // Longer ones are none of a certificate's; 0x80 is not allowed in DER.
            let digits = rest.get(..long - 0x80).filter(|digits| (1..=3).contains(&digits.len()))?;
            let length = digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit));
            (length, &rest[digits.len()..])
        }
    };
    let (inside, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some((*tag, inside))
}

/// `YYMMDDhhmmssZ`, or with a year of four digits.
fn time((tag, text): (u8, &[u8])) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |place: usize, length: usize| {
        let digits = digits.get(place..place + length)?;
        let all = digits.iter().all(u8::is_ascii_digit);
        all.then(|| digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
    };
    let (year, rest) = match tag {
        UTC_TIME => (number(0, 2).map(|year| if year < 50 { 2000 + year } else { 1900 + year })?, 2),
        GENERALIZED_TIME => (number(0, 4)?, 4),
        _ => return None,
    };
    let part = |index: usize| number(rest + 2 * index, 2);
    let (month, day) = (part(0)?, part(1)?);
    // Years begin in March, so that the leap day is the last one.
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some(((days * 24 + part(2)?) * 60 + part(3)?) * 60 + part(4)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str) -> Vec<u8> {
        let mut parameters = rcgen::CertificateParams::default();
        parameters.distinguished_name = rcgen::DistinguishedName::new();
        parameters.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
        parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
        parameters.not_before = rcgen::date_time_ymd(2024, 2, 29);
        parameters.not_after = rcgen::date_time_ymd(2055, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        parameters.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn whose_it_is_and_when_it_is_good() {
        let read = parse(&made("system:node:web-1")).unwrap();
        assert_eq!(read.common_name, "system:node:web-1");
        assert_eq!((read.not_before, read.not_after), (1_709_164_800, 2_682_374_400));
    }

    #[test]
    fn anything_else_is_none_and_harms_nobody() {
        let good = made("a");
        for end in 0..good.len() {
            assert_eq!(parse(&good[..end]), None, "{end}");
        }
        for place in 0..good.len() {
            for byte in [0, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut bad = good.clone();
                bad[place] = byte;
                let _ = parse(&bad);
            }
        }
    }
}
