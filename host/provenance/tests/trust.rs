//! Policies, keys, signatures and allow-lists: what admits a component, and what each thing that is wrong is answered with.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::pkcs8::EncodePublicKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::{Signer, SigningKey};
use timetable_provenance::{
    Digest, ProvenancePolicy, Require, Source, Trust, TrustedKey, Untrusted,
};

const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0a component";

/// The public half of `signer()`, and its signature of `COMPONENT`'s BLAKE2b hash, as minisign writes them: made once, outside
/// of this program.
const MINISIGN_KEY: &str = "RWRUSU1FVEFCTOpKbGPinFIKvvVQexMuxfmVR3auvr57kkIe6mkURtIs";
const MINISIGN_HASHED: &str = "untrusted comment: signature by hand\n\
    RURUSU1FVEFCTIb1EKxyjG8c/wnMS3rd2gnY6+65how5ajKPXr3hNE5ztzJidYG/a3Mbm+8DGMKwR/7XFKCpEmUVyUZqJjB1cgI=\n\
    trusted comment: timestamp:1764500000\tfile:component.wasm\thashed\n\
    yVFpsrT9RFOA+lXdyA2MoAVRKJpGvR0xvR21N4lXPjPe0k4/6Ttm2nIvzspLRqy7K16ACa6GRcH3Moqh8BoyDQ==\n";

fn signer() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

fn raw(content: &[u8]) -> Vec<u8> {
    signer().sign(content).to_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As older minisigns sign: the content itself.
fn minisign(content: &[u8]) -> String {
    let signature = raw(content);
    let comment = "timestamp:1764500000\tfile:component.wasm";
    let global = raw(&[signature.as_slice(), comment.as_bytes()].concat());
    let first = [b"EdTIMETABL".as_slice(), &signature].concat();
    format!(
        "untrusted comment: of a test\n{}\ntrusted comment: {comment}\n{}\n",
        STANDARD.encode(first),
        STANDARD.encode(global)
    )
}

fn ed25519_key() -> TrustedKey {
    TrustedKey::parse(&hex(signer().verifying_key().as_bytes())).unwrap()
}

fn minisign_key() -> TrustedKey {
    TrustedKey::parse(MINISIGN_KEY).unwrap()
}

fn trust(require: Require, keys: Vec<TrustedKey>, allowed_hashes: Vec<Digest>) -> Trust {
    Trust::new(&ProvenancePolicy {
        require,
        keys,
        allowed_hashes,
        ..ProvenancePolicy::default()
    })
    .unwrap()
}

#[test]
fn a_policy_reads_from_toml_and_refuses_what_it_does_not_know() {
    let text = format!(
        "require = \"either\"\nkeys = [\"{MINISIGN_KEY}\"]\nkey_files = [\"a.pub\"]\nallowed_hashes = [\"{}\"]\n",
        hex(&Digest::of(COMPONENT).0)
    );
    let policy: ProvenancePolicy = toml::from_str(&text).unwrap();
    assert_eq!(
        policy,
        ProvenancePolicy {
            require: Require::Either,
            keys: vec![minisign_key()],
            key_files: vec![PathBuf::from("a.pub")],
            allowed_hashes: vec![Digest::of(COMPONENT)],
            allowed_hashes_files: Vec::new(),
        }
    );
    let written = toml::to_string(&policy).unwrap();
    assert_eq!(
        toml::from_str::<ProvenancePolicy>(&written).unwrap(),
        policy
    );
    assert_eq!(
        toml::from_str::<ProvenancePolicy>("").unwrap(),
        ProvenancePolicy::default()
    );
    for (text, part) in [
        ("required = \"none\"", "required"),
        ("require = \"sometimes\"", "allow-list"),
        ("keys = [\"nonsense\"]", "`nonsense` is no public key"),
        ("allowed_hashes = [\"abc\"]", "`abc` is not a SHA-256"),
    ] {
        let error = toml::from_str::<ProvenancePolicy>(text)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn every_form_of_a_key_is_read() {
    let key = signer().verifying_key();
    let der = key.to_public_key_der().unwrap();
    for text in [
        key.to_public_key_pem(LineEnding::LF).unwrap(),
        STANDARD.encode(der.as_bytes()),
        STANDARD.encode(key.as_bytes()),
        format!("# ours\n{}\n", hex(key.as_bytes())),
    ] {
        assert_eq!(TrustedKey::parse(&text).unwrap(), ed25519_key(), "{text}");
    }
    let file = format!("untrusted comment: minisign public key 1\n{MINISIGN_KEY}\n");
    assert_eq!(TrustedKey::parse(&file).unwrap(), minisign_key());
    assert_eq!(
        minisign_key().to_string(),
        format!("minisign:{MINISIGN_KEY}")
    );
}

#[test]
fn what_is_no_key_is_said() {
    // A point of small order: any signature that anyone makes up might verify.
    let no_point = hex(&[&[2][..], &[0; 31]].concat());
    let weak = hex(&[&[1][..], &[0; 31]].concat());
    for (text, part) in [
        ("", "is no public key"),
        ("RWQ", "is no public key"),
        ("one\ntwo", "is no public key"),
        (
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
            "no ed25519 public key",
        ),
        (
            "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "keep this one away",
        ),
        (
            "untrusted comment: minisign encrypted secret key\nRWQ",
            "keep this one away",
        ),
        (&weak, "none; copy it again"),
        (&no_point, "none; copy it again"),
    ] {
        let error = TrustedKey::parse(text).unwrap_err().to_string();
        assert!(error.contains(part), "`{part}` is missing in: {error}");
    }
}

#[test]
fn every_form_of_a_signature_by_a_trusted_key_admits() {
    let trust = trust(
        Require::Signature,
        vec![ed25519_key(), minisign_key()],
        vec![],
    );
    let signature = raw(COMPONENT);
    for (signature, by) in [
        (signature.clone(), ed25519_key()),
        (format!("{}\n", hex(&signature)).into_bytes(), ed25519_key()),
        (STANDARD.encode(&signature).into_bytes(), ed25519_key()),
        (minisign(COMPONENT).into_bytes(), minisign_key()),
        (MINISIGN_HASHED.as_bytes().to_vec(), minisign_key()),
    ] {
        let evidence = trust.admit(COMPONENT, Some(&signature)).unwrap();
        assert_eq!(evidence.content, Digest::of(COMPONENT));
        assert_eq!(evidence.signed_by(), Some(&by));
    }
}

#[test]
fn a_changed_bit_anywhere_is_refused() {
    let trust = trust(
        Require::Signature,
        vec![ed25519_key(), minisign_key()],
        vec![],
    );
    let signature = raw(COMPONENT);
    for bit in 0..signature.len() * 8 {
        let mut changed = signature.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(
            trust.admit(COMPONENT, Some(&changed)).is_err(),
            "signature's bit {bit}"
        );
    }
    for bit in 0..COMPONENT.len() * 8 {
        let mut changed = COMPONENT.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        for signature in [
            &signature,
            MINISIGN_HASHED.as_bytes(),
            minisign(COMPONENT).as_bytes(),
        ] {
            assert!(
                trust.admit(&changed, Some(signature)).is_err(),
                "content's bit {bit}"
            );
        }
    }
    // The trusted comment is signed too; the untrusted one is not.
    let comment = MINISIGN_HASHED.replace("1764500000", "1764500001");
    assert!(trust.admit(COMPONENT, Some(comment.as_bytes())).is_err());
    let comment = MINISIGN_HASHED.replace("by hand", "by foot");
    assert!(trust.admit(COMPONENT, Some(comment.as_bytes())).is_ok());
}

#[test]
fn what_is_wrong_with_a_signature_is_said_with_the_remedy() {
    let other = SigningKey::from_bytes(&[8; 32]).sign(COMPONENT).to_bytes();
    let trust = trust(
        Require::Signature,
        vec![ed25519_key(), minisign_key()],
        vec![],
    );
    let hash = Digest::of(COMPONENT).to_string();
    for (signature, parts) in [
        (None, ["is not signed", "FILE.minisig"]),
        (
            Some(other.to_vec()),
            ["by none of the 2 trusted keys", "sign this very file"],
        ),
        (
            Some(raw(b"other")),
            ["by none of the 2 trusted keys", "sign this very file"],
        ),
        (
            Some(vec![1; 5000]),
            ["has 5000 bytes", "give the detached signature"],
        ),
        (Some(b"\0asm".to_vec()), ["is no signature", "minisign -S"]),
        (Some(vec![]), ["is no signature", "minisign -S"]),
        (
            Some(MINISIGN_HASHED.as_bytes()[..120].to_vec()),
            ["a damaged minisign signature", "copy the whole file"],
        ),
    ] {
        let error = trust
            .admit(COMPONENT, signature.as_deref())
            .unwrap_err()
            .to_string();
        assert!(error.contains(&hash) && !error.contains('\n'), "{error}");
        for part in parts {
            assert!(error.contains(part), "`{part}` is missing in: {error}");
        }
    }
}

/// Every requirement, with and without a signature, in and out of the list.
#[test]
fn each_requirement_admits_what_it_says() {
    let signature = raw(COMPONENT);
    for (require, expected) in [
        // Neither, signed, listed, both.
        (Require::None, [true, true, true, true]),
        (Require::Signature, [false, true, false, true]),
        (Require::AllowList, [false, false, true, true]),
        (Require::Either, [false, true, true, true]),
        (Require::Both, [false, false, false, true]),
    ] {
        for (index, expected) in expected.into_iter().enumerate() {
            let (signed, listed) = (index & 1 == 1, index & 2 == 2);
            let content = if listed { COMPONENT } else { b"another" };
            let trust = trust(require, vec![ed25519_key()], vec![Digest::of(content)]);
            let admitted = trust.admit(COMPONENT, signed.then_some(signature.as_slice()));
            assert_eq!(
                admitted.is_ok(),
                expected,
                "{require:?} signed {signed} listed {listed}"
            );
        }
    }
    let error = trust(Require::AllowList, vec![], vec![Digest::of(b"another")])
        .admit(COMPONENT, Some(&signature))
        .unwrap_err();
    assert_eq!(
        error,
        Untrusted::NotAllowed {
            content: Digest::of(COMPONENT),
            allowed: 1
        }
    );
}

#[test]
fn what_the_program_contains_is_always_admitted() {
    let trust = trust(
        Require::Both,
        vec![ed25519_key()],
        vec![Digest::of(b"another")],
    )
    .with_built_in([Digest::of(COMPONENT)]);
    assert!(trust.admit(COMPONENT, None).is_ok());
    assert!(trust.admit(b"not contained", None).is_err());
}

#[test]
fn a_policy_that_changed_is_asked_again_with_the_evidence() {
    let evidence = trust(Require::Signature, vec![ed25519_key()], vec![])
        .admit(COMPONENT, Some(&raw(COMPONENT)))
        .unwrap();
    let later = trust(Require::Signature, vec![minisign_key()], vec![]);
    assert!(matches!(
        later.permits(&evidence),
        Err(Untrusted::NotTrusted { .. })
    ));
    let later = trust(
        Require::Either,
        vec![minisign_key()],
        vec![Digest::of(COMPONENT)],
    );
    assert_eq!(later.permits(&evidence), Ok(()));
}

#[test]
fn a_policy_that_can_admit_nothing_is_refused() {
    for (require, part) in [
        (Require::Signature, "--trusted-key"),
        (Require::AllowList, "--allow-hashes"),
        (Require::Either, "--trusted-key"),
        (Require::Both, "--trusted-key"),
    ] {
        let policy = ProvenancePolicy {
            require,
            ..ProvenancePolicy::default()
        };
        let error = Trust::new(&policy).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn keys_and_hashes_are_read_from_files() {
    let scratch = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = scratch.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let hashes = format!(
        "# ours\n\n{}  component.wasm\n",
        hex(&Digest::of(COMPONENT).0)
    );
    let mut policy = ProvenancePolicy {
        require: Require::Both,
        key_files: vec![file("release.pub", MINISIGN_KEY.as_bytes())],
        allowed_hashes_files: vec![file("allowed", hashes.as_bytes())],
        ..ProvenancePolicy::default()
    };
    let trust = Trust::new(&policy).unwrap();
    assert!(
        trust
            .admit(COMPONENT, Some(MINISIGN_HASHED.as_bytes()))
            .is_ok()
    );

    for (path, part) in [
        (scratch.path().join("nowhere"), "cannot be read"),
        (scratch.path().to_owned(), "not a regular file"),
        (file("large", &[b'#'; 17 << 10]), "more than 16384 bytes"),
        (file("binary", &[0xff, 0]), "is no public key"),
    ] {
        policy.key_files = vec![path.clone()];
        let error = Trust::new(&policy).unwrap_err().to_string();
        assert!(
            error.contains(part) && error.contains(path.to_str().unwrap()),
            "{error}"
        );
    }
    policy.key_files = vec![scratch.path().join("release.pub")];
    policy.allowed_hashes_files = vec![file("bad", b"# ours\nabc component.wasm\n")];
    let error = Trust::new(&policy).unwrap_err().to_string();
    assert!(
        error.contains("bad, line 2: `abc` is not a SHA-256"),
        "{error}"
    );
}

#[test]
fn a_signature_is_found_beside_its_component_or_where_it_is_said() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("builder.wasm");
    std::fs::write(&path, COMPONENT).unwrap();
    let source: Source = path.to_str().unwrap().parse().unwrap();
    let limits = timetable_provenance::FetchLimits::default();
    assert_eq!(source.fetch(None, &limits).unwrap().signature, None);

    std::fs::write(scratch.path().join("builder.wasm.sig"), "ed25519").unwrap();
    let fetched = source.fetch(None, &limits).unwrap();
    assert_eq!(fetched.component, COMPONENT);
    assert_eq!(fetched.signature.as_deref(), Some(b"ed25519".as_slice()));
    std::fs::write(scratch.path().join("builder.wasm.minisig"), "minisign").unwrap();
    let fetched = source.fetch(None, &limits).unwrap();
    assert_eq!(fetched.signature.as_deref(), Some(b"minisign".as_slice()));

    let other = scratch.path().join("other");
    let error = source.fetch(Some(&other), &limits).unwrap_err().to_string();
    assert!(
        error.contains("signature") && error.contains("other: cannot be read"),
        "{error}"
    );
    std::fs::write(&other, "other").unwrap();
    let fetched = source.fetch(Some(&other), &limits).unwrap();
    assert_eq!(fetched.signature.as_deref(), Some(b"other".as_slice()));

    let missing: Source = "nowhere.wasm".parse().unwrap();
    let error = missing.fetch(None, &limits).unwrap_err().to_string();
    assert!(
        error.contains("component nowhere.wasm: cannot be read"),
        "{error}"
    );
}
