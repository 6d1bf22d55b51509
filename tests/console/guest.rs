//! A real guest of 64 KiB: the firmware of a PC, which QEMU runs from the reset on, with all of it on the serial port COM1.
//!
//! It says [`GREETING`], and then answers each key with the next letter of the alphabet, so that no echo can be taken for an answer.
//! After the key `F` it writes [`FLOOD`] times `x`, then `D` to the debug port 0xE9, which the test sees by another way, and then `D`.

/// What it says first.
pub const GREETING: &str = "firmware of the tests\r\n";
/// Bytes that it writes after `F`.
pub const FLOOD: usize = 64 << 16;

/// Where the greeting is.
const GREETING_AT: usize = 0x60;
/// Where a processor begins.
const RESET_AT: usize = 0xfff0;

/// Machine code of a processor in real mode. The offsets in the remarks are those that jumps and calls count with.
#[rustfmt::skip]
const CODE: &[u8] = &[
    /* 00 */ 0xfa,                    // cli
    /* 01 */ 0xba, 0xfb, 0x03,        // mov dx, 0x3fb        line control of COM1:
    /* 04 */ 0xb0, 0x03,              // mov al, 3            8 bits, no parity
    /* 06 */ 0xee,                    // out dx, al
    /* 07 */ 0xbe, 0x60, 0x00,        // mov si, GREETING_AT
    /* 0a */ 0x2e, 0xac,              // cs lodsb
    /* 0c */ 0x84, 0xc0,              // test al, al
    /* 0e */ 0x74, 0x05,              // jz 15
    /* 10 */ 0xe8, 0x19, 0x00,        // call 2c
    /* 13 */ 0xeb, 0xf5,              // jmp 0a
    // The next key:
    /* 15 */ 0xba, 0xfd, 0x03,        // mov dx, 0x3fd        line status
    /* 18 */ 0xec,                    // in al, dx
    /* 19 */ 0xa8, 0x01,              // test al, 1           one has come
    /* 1b */ 0x74, 0xf8,              // jz 15
    /* 1d */ 0xba, 0xf8, 0x03,        // mov dx, 0x3f8
    /* 20 */ 0xec,                    // in al, dx
    /* 21 */ 0x3c, b'F',              // cmp al, 'F'
    /* 23 */ 0x74, 0x16,              // je 3b
    /* 25 */ 0xfe, 0xc0,              // inc al
    /* 27 */ 0xe8, 0x02, 0x00,        // call 2c
    /* 2a */ 0xeb, 0xe9,              // jmp 15
    // Writes al:
    /* 2c */ 0x50,                    // push ax
    /* 2d */ 0xba, 0xfd, 0x03,        // mov dx, 0x3fd
    /* 30 */ 0xec,                    // in al, dx
    /* 31 */ 0xa8, 0x20,              // test al, 0x20        there is room
    /* 33 */ 0x74, 0xfb,              // jz 30
    /* 35 */ 0x58,                    // pop ax
    /* 36 */ 0xba, 0xf8, 0x03,        // mov dx, 0x3f8
    /* 39 */ 0xee,                    // out dx, al
    /* 3a */ 0xc3,                    // ret
    // The flood:
    /* 3b */ 0xbb, 0x40, 0x00,        // mov bx, FLOOD >> 16
    /* 3e */ 0x31, 0xc9,              // xor cx, cx           65536 times:
    /* 40 */ 0xb0, b'x',              // mov al, 'x'
    /* 42 */ 0xe8, 0xe7, 0xff,        // call 2c
    /* 45 */ 0xe2, 0xf9,              // loop 40
    /* 47 */ 0x4b,                    // dec bx
    /* 48 */ 0x75, 0xf4,              // jnz 3e
    /* 4a */ 0xb0, b'D',              // mov al, 'D'
    /* 4c */ 0xe6, 0xe9,              // out 0xe9, al
    /* 4e */ 0xe8, 0xdb, 0xff,        // call 2c
    /* 51 */ 0xeb, 0xc2,              // jmp 15
];
/// A jump to the beginning.
const RESET: &[u8] = &[0xe9, 0x0d, 0x00];

/// The firmware.
pub fn firmware() -> Vec<u8> {
    assert!(CODE.len() <= GREETING_AT && FLOOD >> 16 == usize::from(CODE[0x3c]));
    let mut rom = vec![0; 64 << 10];
    rom[..CODE.len()].copy_from_slice(CODE);
    rom[GREETING_AT..GREETING_AT + GREETING.len()].copy_from_slice(GREETING.as_bytes());
    rom[RESET_AT..RESET_AT + RESET.len()].copy_from_slice(RESET);
    rom
}
