//! Numbers for tests that go another way in each run, and the same way again where that is asked for.

#![allow(clippy::print_stdout, reason = "a run that fails is repeated by what it says")]

/// Where the numbers of a run begin: somewhere else in each, and where `GUESTLET_SEED` says to repeat one.
pub fn seed() -> u64 {
    let said = std::env::var("GUESTLET_SEED").ok().map(|said| said.parse().unwrap());
    let seed = said.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::from(now.subsec_nanos())
    });
    println!("GUESTLET_SEED={seed} repeats this run");
    seed
}

/// Numbers that look random, the same for the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).unwrap() % end
    }
}
