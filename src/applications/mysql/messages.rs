//! Client/server protocol of MySQL and MariaDB, as far as this client needs it: pure. See the documentation of the
//! protocol by either server.

use super::fields::Fields;

/// Capabilities `CLIENT_LONG_PASSWORD`, `CLIENT_PROTOCOL_41`, `CLIENT_TRANSACTIONS`, `CLIENT_RESERVED2` (the
/// authentication of 4.1) and `CLIENT_PLUGIN_AUTH`: none that would make answers more complex, such as multiple
/// results, compression or files.
const CAPABILITIES: u32 = 0x1 | 0x200 | 0x2000 | 0x8000 | 0x8_0000;
/// Capabilities among them that a server must offer.
const NEEDED: u32 = 0x200 | 0x8000 | 0x8_0000;
/// Version of the protocol, the same for every server since 4.1.
const PROTOCOL: u8 = 10;
/// Collation `utf8mb4_general_ci`.
const UTF8: u8 = 45;
/// Maximum size of a packet that the client accepts, in bytes.
const MOST_TAKEN: u32 = 64 * 1024;

/// First message of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Version of the server, such as `8.0.36` or `5.5.5-10.11.6-MariaDB`.
    pub version: String,
    /// Authentication plugin that is used unless the account has a different one.
    pub plugin: String,
}

/// Error message of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerError {
    /// Error number, such as 1205.
    pub code: u16,
    /// Message text from the server.
    pub message: String,
}

/// Answer of a server to a login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Login {
    /// The login has succeeded.
    Done,
    /// The account uses a different authentication plugin.
    Switch(String),
    /// The plugin requests more data, such as a password.
    More,
    /// The login is refused.
    Refused(ServerError),
}

/// First packet of an answer to a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The statement has succeeded, and returns no rows.
    Done,
    /// The statement returns this number of columns, whose definitions follow, and then rows.
    Columns(u64),
    /// The statement has failed.
    Failed(ServerError),
}

/// Packet after the column definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row {
    /// Values of a row, in the order of the columns.
    Values(Vec<Option<String>>),
    /// End of the rows.
    End,
    /// The statement has failed while rows were sent.
    Failed(ServerError),
}

/// Parses the first packet of a connection; `None` if it is not the greeting of a server that this client
/// supports.
pub fn greeting(packet: &[u8]) -> Option<Result<Greeting, ServerError>> {
    let mut fields = Fields::of(packet);
    match fields.byte()? {
        0xff => return error(fields).map(Err),
        PROTOCOL => {}
        _ => return None,
    }
    let version = text(fields.terminated()?);
    let _connection = fields.number(4)?;
    let _challenge = fields.bytes(9)?;
    let low = fields.number(2)?;
    let _character_set_and_status = fields.bytes(3)?;
    let high = fields.number(2)?;
    let challenge = usize::from(fields.byte()?);
    let offered = high << 16 | low;
    if offered & u64::from(NEEDED) != u64::from(NEEDED) {
        return None;
    }
    let _reserved = fields.bytes(10)?;
    let _challenge = fields.bytes(challenge.saturating_sub(8).max(13))?;
    // Some servers leave out the zero byte at the end.
    let plugin = fields.terminated().unwrap_or_else(|| fields.rest());
    Some(Ok(Greeting { version, plugin: text(plugin) }))
}

/// Builds the login of a user without a password.
pub fn login(user: &str, plugin: &str) -> Vec<u8> {
    let mut packet = Vec::with_capacity(64 + user.len() + plugin.len());
    packet.extend(CAPABILITIES.to_le_bytes());
    packet.extend(MOST_TAKEN.to_le_bytes());
    packet.push(UTF8);
    packet.extend([0; 23]);
    packet.extend(user.bytes().filter(|byte| *byte != 0));
    packet.push(0);
    // Length of the authentication data: there is no password.
    packet.push(0);
    packet.extend(plugin.bytes().filter(|byte| *byte != 0));
    packet.push(0);
    packet
}

/// Parses an answer to a login; `None` if the packet is not one.
pub fn login_answer(packet: &[u8]) -> Option<Login> {
    let mut fields = Fields::of(packet);
    Some(match fields.byte()? {
        0 => Login::Done,
        1 => Login::More,
        0xfe => Login::Switch(text(fields.terminated().unwrap_or_else(|| fields.rest()))),
        0xff => Login::Refused(error(fields)?),
        _ => return None,
    })
}

/// Parses the first packet of an answer to a query; `None` if the packet is not one.
pub fn answer(packet: &[u8]) -> Option<Answer> {
    let mut fields = Fields::of(packet);
    match *packet.first()? {
        0 => Some(Answer::Done),
        0xff => {
            fields.byte()?;
            error(fields).map(Answer::Failed)
        }
        _ => {
            let columns = fields.counted_number()?;
            fields.is_empty().then_some(Answer::Columns(columns))
        }
    }
}

/// Returns whether a packet ends the column definitions, or the rows.
fn is_end(packet: &[u8]) -> bool {
    packet.first() == Some(&0xfe) && packet.len() < 9
}

/// Parses a packet among the column definitions: returns whether it is the end of them, or the error; `None` if it
/// is malformed.
pub fn column(packet: &[u8]) -> Option<Result<bool, ServerError>> {
    let mut fields = Fields::of(packet);
    match fields.byte()? {
        0xff => error(fields).map(Err),
        _ => Some(Ok(is_end(packet))),
    }
}

/// Parses a packet after the columns; `None` if it is neither a row with this number of values nor the end.
pub fn row(packet: &[u8], columns: usize) -> Option<Row> {
    let mut fields = Fields::of(packet);
    if packet.first() == Some(&0xff) {
        fields.byte()?;
        return error(fields).map(Row::Failed);
    }
    if is_end(packet) {
        return Some(Row::End);
    }
    let mut values = Vec::with_capacity(columns);
    for _ in 0..columns {
        values.push(fields.value()?.map(text));
    }
    fields.is_empty().then_some(Row::Values(values))
}

/// Parses an error, without its first byte.
fn error(mut fields: Fields<'_>) -> Option<ServerError> {
    let code = u16::try_from(fields.number(2)?).ok()?;
    let mut message = fields.rest();
    // An error before the client has sent its capabilities has no SQL state.
    if let [b'#', state @ ..] = message {
        message = state.get(5..)?;
    }
    Some(ServerError { code, message: text(message) })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Greeting captured from a MariaDB 10.11.
    const GREETING: &[u8] = b"\n5.5.5-10.11.19-MariaDB-0+deb12u1-log\x00\n\x00\x00\x00puy#=J=4\x00\xfe\xf7\x08\x02\x00\xff\x81\x15\x00\
        \x00\x00\x00\x00\x00\x1d\x00\x00\x00+x?o3MkT@%7%\x00mysql_native_password\x00";

    #[test]
    fn a_greeting_is_understood() {
        let known = greeting(GREETING).unwrap().unwrap();
        assert_eq!(known.version, "5.5.5-10.11.19-MariaDB-0+deb12u1-log");
        assert_eq!(known.plugin, "mysql_native_password");
        let full = greeting(b"\xff\x10\x04Too many connections").unwrap().unwrap_err();
        assert_eq!(full, ServerError { code: 1040, message: "Too many connections".to_owned() });
        let mut old = GREETING.to_vec();
        old[0] = 9;
        assert_eq!(greeting(&old), None);
        for length in 0..GREETING.len() - 30 {
            assert_eq!(greeting(&GREETING[..length]), None, "{length}");
        }
    }

    #[test]
    fn answers_are_told_apart() {
        assert_eq!(login_answer(b"\0\0\0\x02\0\0\0"), Some(Login::Done));
        assert_eq!(login_answer(b"\x01\x04"), Some(Login::More));
        let switch = login_answer(b"\xfemysql_native_password\x00-$mz?iq}Bo(v>n4T*q|?\x00");
        assert_eq!(switch, Some(Login::Switch("mysql_native_password".to_owned())));
        let refused = login_answer(b"\xff\xa2\x06#28000Access denied for user 'root'@'localhost'");
        assert!(matches!(refused, Some(Login::Refused(ServerError { code: 1698, .. }))), "{refused:?}");
        assert_eq!(answer(b"\0\0\0\x02\0\0\0"), Some(Answer::Done));
        assert_eq!(answer(b"\x02"), Some(Answer::Columns(2)));
        // A request of the server for a local file (LOAD DATA LOCAL) is refused.
        assert_eq!(answer(b"\xfb/etc/passwd"), None);
        let failed = answer(b"\xffz\x04#42S02Table 'mysql.nosuch' doesn't exist");
        assert!(matches!(failed, Some(Answer::Failed(ServerError { code: 1146, .. }))), "{failed:?}");
        assert_eq!(row(b"\x017\xfb", 2), Some(Row::Values(vec![Some("7".to_owned()), None])));
        assert_eq!(row(b"\xfe\0\0\x02\0", 2), Some(Row::End));
        assert_eq!((row(b"\x017\xfb", 1), row(b"\x017", 2)), (None, None));
        assert_eq!(column(b"\xfe\0\0\x02\0"), Some(Ok(true)));
    }

    #[test]
    fn a_name_of_a_user_ends_where_it_should() {
        let packet = login("my\0sql", "auth_socket");
        assert!(packet.ends_with(b"\0\0mysql\0\0auth_socket\0"), "{packet:?}");
        assert_eq!(packet.len(), 32 + 6 + 1 + 12);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(bytes: Vec<u8>, first: u8, columns in 0usize..64) {
            let mut packet = vec![first];
            packet.extend(bytes);
            let _ = (greeting(&packet), login_answer(&packet), answer(&packet), column(&packet));
            if let Some(Row::Values(values)) = row(&packet, columns) {
                prop_assert_eq!(values.len(), columns);
            }
        }

        #[test]
        fn a_greeting_that_is_cut_or_altered_is_read_or_refused(place in 0..GREETING.len(), byte: u8, length in 0..GREETING.len()) {
            let mut packet = GREETING.to_vec();
            packet[place] = byte;
            packet.truncate(length);
            let _ = greeting(&packet);
        }
    }
}
