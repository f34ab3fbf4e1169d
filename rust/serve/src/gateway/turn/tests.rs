//! Tests of the names by which clients take turns.

use super::*;

fn name(identity: &str, headers: &[(&'static str, &str)], user: Option<&str>) -> String {
    let headers =
        headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    let identity: Identity = identity.parse().unwrap();
    identity.client(user, &headers.collect(), Some("10.0.0.1".parse().unwrap())).name
}

#[test]
fn a_client_with_a_key_is_one_client_whatever_it_calls_itself() {
    let key = [("authorization", "Bearer a")];
    let own = name("authorization", &key, None);
    assert!(own.starts_with("key-") && !own.contains("Bearer"));
    for user in ["victim", "fresh-1", "fresh-2"] {
        assert_eq!(name("authorization", &key, Some(user)), own);
        assert_ne!(name("authorization", &[("authorization", "Bearer b")], Some(user)), own);
    }
    assert_eq!(name("authorization", &[], Some("u")), "u");
    assert_eq!(name("authorization", &[], None), "10.0.0.1");
    assert_eq!(name("user", &key, Some("u")), "u");
    assert_eq!(name("user", &key, None), own);
    let said = [("authorization", "Bearer a"), ("x-tenant", "t")];
    assert_eq!(name("header:X-Tenant", &said, Some("u")), "t");
    assert_eq!(name("header:x-tenant", &key, Some("u")), own);
    let long = "ü".repeat(200);
    assert_eq!(name("header:x-tenant", &[("x-tenant", &long)], None), "ü".repeat(128));
}

#[test]
fn names_that_a_client_chooses_are_in_the_group_of_its_network() {
    let group = |identity: &str, headers: &[(&'static str, &str)], address: &str| {
        let headers =
            headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let identity: Identity = identity.parse().unwrap();
        let address = Some(address.parse().unwrap());
        identity.client(Some("u"), &headers.collect(), address).group
    };
    let of = |text: &str| Some(text.to_owned());
    for headers in [&[][..], &[("authorization", "Bearer a")]] {
        assert_eq!(group("authorization", headers, "10.0.0.1"), of("10.0.0.1"));
        assert_eq!(group("authorization", headers, "::ffff:10.0.0.1"), of("10.0.0.1"));
        let v6 = ["2001:db8:0:1::7", "2001:db8:0:1:ffff::"];
        let networks = v6.map(|address| group("authorization", headers, address));
        assert_eq!(networks, [of("2001:db8:0:1::/64"), of("2001:db8:0:1::/64")]);
        assert_eq!(group("header:x-tenant", headers, "10.0.0.1"), of("10.0.0.1"));
        // What a gateway says is certain.
        assert_eq!(group("user", headers, "10.0.0.1"), None);
    }
    assert_eq!(group("header:x-tenant", &[("x-tenant", "t")], "10.0.0.1"), None);
    assert_eq!(Identity::default().client(None, &HeaderMap::new(), None).group, None);
}

#[test]
fn what_is_no_identity_is_named() {
    for text in ["", "key", "header", "header:", "header:a b", "user:x"] {
        let error = text.parse::<Identity>().unwrap_err().to_string();
        assert!(error.contains("authorization, user or header:NAME, got"), "{error}");
    }
}

#[test]
fn settings_of_fair_queueing_alone_are_named() {
    let given = FairnessSettings {
        fairness_max_running: 8,
        fairness_weight: vec![("a".into(), 2.0)],
        ..FairnessSettings::default()
    };
    assert_eq!(given.changed(), ["--fairness-weight", "--fairness-max-running"]);
    assert!(FairnessSettings::default().changed().is_empty());
    assert!(FairnessOptions::of(given, 1).unwrap().is_none());
}
