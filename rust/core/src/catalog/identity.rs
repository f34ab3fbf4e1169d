//! Adapter and salt of an index, for events and queries that name none.

use std::collections::HashSet;

use parking_lot::RwLock;

use super::model::ModelKey;
use crate::error::{Error, Result};
use crate::hash;

/// LoRA adapter and cache salt. `None` means unspecified, an empty name means none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// The salt.
    pub cache_salt: Option<String>,
}

/// Maximum adapters of an index whose seeds are known.
const MAX_ADAPTERS: usize = 4096;

/// The identity from the first registration of an index; dropped with the last publisher.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    held: RwLock<Option<Identity>>,
    /// Seeds of the adapters that events named, without a salt of the event's own.
    adapters: RwLock<HashSet<u64>>,
}

impl Agreement {
    /// Checks that a publisher with this identity may join.
    ///
    /// # Errors
    /// `Conflict` naming the field, the given and the current value.
    pub fn check(&self, given: &Identity, key: &ModelKey) -> Result<()> {
        let held = self.held.read();
        let Some(held) = held.as_ref() else { return Ok(()) };
        check_name("lora_name", &given.lora_name, &held.lora_name, key)?;
        check_name("additional_salt", &given.cache_salt, &held.cache_salt, key)
    }

    /// Records that a publisher has joined: the first one decides.
    pub fn settle(&self, given: Identity) {
        self.held.write().get_or_insert(given);
    }

    /// The current identity.
    pub fn held(&self) -> Identity {
        self.held.read().clone().unwrap_or_default()
    }

    /// Drops the identity with the last publisher.
    pub fn forget(&self) {
        *self.held.write() = None;
        self.adapters.write().clear();
    }

    /// Records the seed of an adapter that an event named, without the event's salt.
    pub fn note_adapter(&self, seed: u64) {
        if self.adapters.read().contains(&seed) {
            return;
        }
        let mut adapters = self.adapters.write();
        if adapters.len() < MAX_ADAPTERS {
            adapters.insert(seed);
        }
    }

    /// Whether `seed` is, or could be, that of the model or an adapter without an event's salt.
    pub fn is_unsalted(&self, seed: u64) -> bool {
        let adapters = self.adapters.read();
        seed == self.seed(None, None) || adapters.contains(&seed) || adapters.len() == MAX_ADAPTERS
    }

    /// The seed of an event or a query with this identity.
    pub fn seed(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> u64 {
        let held = self.held.read();
        let held = held.as_ref();
        let lora_name = lora_name.or_else(|| held?.lora_name.as_deref());
        let cache_salt = cache_salt.or_else(|| held?.cache_salt.as_deref());
        hash::identity_seed(lora_name, cache_salt)
    }
}

fn check_name(
    field: &str,
    given: &Option<String>,
    held: &Option<String>,
    key: &ModelKey,
) -> Result<()> {
    let Some(given) = given else { return Ok(()) };
    let held = held.as_deref().unwrap_or("");
    if given == held {
        return Ok(());
    }
    Err(Error::Conflict(format!(
        "{field} {given:?} differs from {held:?}, that of model={} tenant={}",
        key.model_name, key.tenant_id
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn identity(lora_name: Option<&str>, cache_salt: Option<&str>) -> Identity {
        let owned = |name: Option<&str>| name.map(str::to_owned);
        Identity { lora_name: owned(lora_name), cache_salt: owned(cache_salt) }
    }

    #[test]
    fn the_first_registration_decides_until_the_last_one_goes() {
        let key = ModelKey { model_name: "m".to_owned(), tenant_id: "t".to_owned() };
        let agreement = Agreement::default();
        agreement.check(&identity(None, Some("b")), &key).unwrap();
        agreement.settle(identity(Some("sql"), Some("a")));
        agreement.settle(identity(None, Some("b")));
        for joins in [identity(None, None), identity(Some("sql"), Some("a"))] {
            assert_eq!(agreement.check(&joins, &key), Ok(()));
        }
        let error = agreement.check(&identity(None, Some("b")), &key).unwrap_err().to_string();
        assert!(
            error.contains("additional_salt \"b\" differs from \"a\", that of model=m tenant=t")
        );
        let error = agreement.check(&identity(Some(""), None), &key).unwrap_err().to_string();
        assert!(error.contains("lora_name \"\" differs from \"sql\""), "{error}");
        agreement.forget();
        agreement.check(&identity(Some(""), Some("b")), &key).unwrap();
    }

    #[test]
    fn what_a_query_says_comes_before_what_the_index_says() {
        let agreement = Agreement::default();
        assert_eq!(agreement.seed(None, None), hash::SEED);
        agreement.settle(identity(Some("sql"), Some("a")));
        let seed = hash::identity_seed;
        assert_eq!(agreement.seed(None, None), seed(Some("sql"), Some("a")));
        assert_eq!(agreement.seed(Some("x"), None), seed(Some("x"), Some("a")));
        assert_eq!(agreement.seed(None, Some("b")), seed(Some("sql"), Some("b")));
        assert_eq!(agreement.seed(Some(""), Some("")), hash::SEED);
    }
}
