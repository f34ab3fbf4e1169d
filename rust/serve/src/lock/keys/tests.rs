#![allow(clippy::unwrap_used)]

use argon2::password_hash::{PasswordHasher, SaltString};
use argon2::{Algorithm, Argon2, Params, Version};

use super::*;

/// The hash of a key as `kvflash keys add` writes it.
pub(in crate::lock) fn sha256(key: &str, salt: &str) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("sha256${}${}", hex(salt.as_bytes()), hex(&digest_of(salt.as_bytes(), key.as_bytes())))
}

/// A cheap hash of the slow kind.
pub(in crate::lock) fn argon2(key: &str) -> String {
    let params = Params::new(Params::MIN_M_COST, 1, 1, None).unwrap();
    let hasher = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    let salt = SaltString::encode_b64(b"a salt of bytes").unwrap();
    hasher.hash_password(key.as_bytes(), &salt).unwrap().to_string()
}

fn found(keys: &Keys, presented: &str) -> Option<String> {
    match keys.find(presented.as_bytes()) {
        Found::Key(key) => Some(key.id.clone()),
        Found::Slow => Some("slow".to_owned()),
        Found::Nothing => None,
    }
}

#[test]
fn keys_are_found_by_their_hash() {
    let text = format!(
        "# people\n\nann:{}:admin\nbob:{}:client:tenant=blue,rpm=60,tpm=1000,concurrency=4,isolate=true,\
         allow=nvext|priority\neve:{}:metrics\n",
        sha256("key of ann", "salt one"),
        sha256("key of bob", "salt two"),
        sha256("key of eve", "salt one"),
    );
    let keys = Keys::parse(&text).unwrap();
    for (id, key) in [("ann", "key of ann"), ("bob", "key of bob"), ("eve", "key of eve")] {
        assert_eq!(found(&keys, key).as_deref(), Some(id));
    }
    for wrong in ["", "key of an", "key of ann ", "ann", &"x".repeat(MAX_KEY_BYTES + 1)] {
        assert_eq!(found(&keys, wrong), None, "{wrong:?}");
    }
    let Found::Key(bob) = keys.find(b"key of bob") else { panic!("bob is there") };
    assert_eq!(
        *bob,
        Key {
            id: "bob".into(),
            role: Role::Client,
            tenant: "blue".into(),
            rpm: Some(60),
            tpm: Some(1000),
            concurrency: Some(4),
            is_isolated: true,
            allow: vec![Pass::Nvext, Pass::Priority],
        }
    );
    assert!([Role::Admin, Role::Client, Role::Metrics].into_iter().all(|role| keys.has(role)));
    assert!(!Keys::parse("").unwrap().has(Role::Admin));
}

#[test]
fn a_slow_hash_is_compared_once() {
    let keys = Keys::parse(&format!("ann:{}:client\n", argon2("hunter2"))).unwrap();
    assert_eq!(found(&keys, "hunter2").as_deref(), Some("slow"));
    assert_eq!(keys.compare(b"hunter3"), None);
    assert_eq!(found(&keys, "hunter2").as_deref(), Some("slow"));
    assert_eq!(keys.compare(b"hunter2").unwrap().id, "ann");
    assert_eq!(found(&keys, "hunter2").as_deref(), Some("ann"));
    assert_eq!(found(&keys, "hunter3").as_deref(), Some("slow"));
}

#[test]
fn a_bad_line_is_named_by_number_field_and_what_is_legal() {
    let hash = sha256("the secret", "salt one");
    let many = |count: usize| {
        let line = |at: usize| format!("k{at}:{}:admin\n", sha256("k", &format!("salt of {at}")));
        (0..count).map(line).collect::<String>()
    };
    let slow = argon2("x");
    let slow_lines: String = (0..17).map(|at| format!("k{at}:{slow}:admin\n")).collect();
    for (text, wanted) in [
        ("the secret".to_owned(), "line 1: must be id:HASH:ROLE[:option=value,...]"),
        (format!("# x\n\na b:{hash}:admin"), "line 3: id must be 1 to 64 letters"),
        (format!("a:{hash}:root"), "role must be admin, client or metrics, got \"root\""),
        ("a:the secret:admin".to_owned(), "hash: must be sha256$SALT$DIGEST, an argon2 PHC"),
        ("a:sha256$0011$00:admin".to_owned(), "the salt must have 8 to 64 bytes, got 2"),
        ("a:sha256$0011223344556677$00:admin".to_owned(), "the digest must have 32 bytes, got 1"),
        ("a:sha256$xx$00:admin".to_owned(), "needs both parts in hex"),
        ("a:$argon2id$v=19$m=9:admin".to_owned(), "argon2: "),
        (
            "a:$argon2id$v=19$m=4194304,t=1,p=1$YSBzYWx0IG9mIGJ5dGVz$YSBzYWx0IG9mIGJ5dGVz:admin"
                .to_owned(),
            "at most m=262144 and t=16, got m=4194304",
        ),
        (
            format!("a:{hash}:client:rpm=0"),
            "option rpm must be a whole number of at least 1, got \"0\"",
        ),
        (format!("a:{hash}:client:rpm=1,rpm=2"), "duplicate option rpm"),
        (format!("a:{hash}:client:rpm"), "option \"rpm\" must be name=value"),
        (
            format!("a:{hash}:client:color=red"),
            "unknown option \"color\"; known options are tenant, rpm,",
        ),
        (format!("a:{hash}:client:isolate=yes"), "option isolate must be true or false"),
        (format!("a:{hash}:client:tenant=a/b"), "option tenant must be 1 to 64 letters"),
        (format!("a:{hash}:client:allow=nvext|all"), "option allow takes kv_transfer_params|"),
        (format!("a:{hash}:admin:rpm=5"), "option rpm is only for clients, the role is admin"),
        (format!("a:{hash}:admin\na:{hash}:admin"), "line 2: duplicate id \"a\""),
        (format!("a:{hash}:admin\nb:{hash}:admin"), "line 2: the key \"a\" has the same hash"),
        (many(65), "line 65: there are more than 64 different salts"),
        (slow_lines, "line 17: there are more than 16 keys with an argon2 hash"),
    ] {
        let error = Keys::parse(&text).map(drop).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
        assert!(!error.contains("the secret") && !error.contains(&hash[30..]), "{error}");
    }
}

#[test]
fn a_file_is_read_again_when_it_changes() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("kvflash-keys-{}", std::process::id()));
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    let line = |id: &str| format!("{id}:{}:client\n", sha256(id, "salt one"));
    write(&line("ann"));
    let file = Keys::open(&path).unwrap();
    assert_eq!(found(&file.current(), "ann").as_deref(), Some("ann"));
    write(&(line("ann") + &line("bob")));
    file.renew();
    assert_eq!(found(&file.current(), "bob").as_deref(), Some("bob"));
    // What can't be used changes nothing.
    write("bob\n");
    file.renew();
    assert_eq!(found(&file.current(), "bob").as_deref(), Some("bob"));
    write(&line("ann"));
    file.renew();
    assert_eq!(found(&file.current(), "bob"), None);
    // A file that was truncated opens nothing.
    write("");
    file.renew();
    assert_eq!(found(&file.current(), "ann"), None);
    assert!(file.current().has(Role::Client) && !file.current().has(Role::Admin));
    write(&line("ann"));
    file.renew();
    assert_eq!(found(&file.current(), "ann").as_deref(), Some("ann"));
    // Nothing but the mode changes.
    let set_mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    set_mode(0o666);
    file.renew();
    assert!(file.trouble().is_some());
    assert_eq!(found(&file.current(), "ann").as_deref(), Some("ann"), "known keys stay");
    set_mode(0o600);
    file.renew();
    assert_eq!(file.trouble(), None);
    set_mode(0o666);
    let error = Keys::open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains("every user may write to it (mode 666)"), "{error}");
    std::fs::remove_file(&path).unwrap();
    let error = Keys::open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains("--keys-file") && error.contains("can't be read"), "{error}");
}

#[test]
fn a_certificate_is_found_by_its_first_known_name() {
    let text = "Ann.internal:certificate:admin\nbob.internal:certificate:client:isolate=true\n";
    let keys = Keys::parse(text).unwrap();
    let found = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        keys.find_certified(&names).map(|key| key.id.clone())
    };
    assert_eq!(found(&["other", "ann.INTERNAL", "bob.internal"]).as_deref(), Some("Ann.internal"));
    assert_eq!(found(&["ann.internal.evil"]), None);
    assert_eq!(found(&[]), None);
    assert!(keys.has_certified() && keys.has_isolated() && keys.has(Role::Client));
    assert!(matches!(keys.find(b"certificate"), Found::Nothing));
    let twice = Keys::parse("a:certificate:admin\nA:certificate:client\n").unwrap_err();
    assert!(twice.contains("line 2") && twice.contains("\"a\""), "{twice}");
}
