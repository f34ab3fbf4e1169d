//! Workers and storage tiers.

use std::fmt;

/// One engine instance, as numbered by its operator.
pub type InstanceId = u64;

/// One engine instance and data-parallel rank: the unit that holds blocks and takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// The engine instance.
    pub instance_id: InstanceId,
    /// Data-parallel rank within the instance; 0 for a single rank.
    pub dp_rank: u32,
}

impl Worker {
    /// The worker of `instance_id` at `dp_rank`.
    pub const fn new(instance_id: InstanceId, dp_rank: u32) -> Self {
        Self { instance_id, dp_rank }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.instance_id, self.dp_rank)
    }
}

named! {
    /// Location of a worker's block; faster tiers first.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub enum Tier {
        /// Accelerator memory: a hit costs nothing.
        Device = "device",
        /// Host memory.
        Host = "host_pinned",
        /// Local disk.
        Disk = "disk",
        /// Storage shared with other workers, over a network.
        External = "external",
    }
}

impl Tier {
    /// The tier of an engine's medium name; `None` for an unknown name (the event is then skipped
    /// and counted: unknown input never earns credit).
    ///
    /// Source: the medium names of vLLM, SGLang and their offloading connectors.
    pub fn from_medium(medium: &str) -> Option<Tier> {
        const MEDIA: [(&[&str], Tier); 4] = [
            (&["GPU", "DEVICE"], Tier::Device),
            (&["CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED"], Tier::Host),
            (&["CPU_TIER2", "DISK", "NVME", "STORAGE", "FS"], Tier::Disk),
            (&["EXTERNAL", "NETWORK", "REMOTE", "SHARED"], Tier::External),
        ];
        // Called several times per event, so it allocates nothing.
        let is_named = |names: &[&str]| names.iter().any(|name| medium.eq_ignore_ascii_case(name));
        MEDIA.into_iter().find_map(|(names, tier)| is_named(names).then_some(tier))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_is_a_medium_by_its_own_name_in_either_case() {
        for tier in Tier::ALL {
            assert_eq!(Tier::from_medium(tier.name()), Some(tier));
            assert_eq!(Tier::from_medium(&tier.name().to_uppercase()), Some(tier));
        }
    }
}
