//! Components from a registry on loopback: what is fetched, and what each thing that can be wrong is answered with.

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use support::{LAYER, Registry, Reply, blob, manifest};
use timetable_provenance::{Digest, FetchLimits, Source};

const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0a component";

fn limits() -> FetchLimits {
    FetchLimits {
        component_bytes_max: 4096,
        ..FetchLimits::default()
    }
}

fn fetch(reference: &str) -> Result<Vec<u8>, String> {
    let source: Source = reference.parse().map_err(|error| format!("{error}"))?;
    let fetched = source
        .fetch(None, &limits())
        .map_err(|error| error.to_string())?;
    assert!(fetched.signature.is_none());
    Ok(fetched.component)
}

/// It fails in one line with every part in it, the reference first.
#[track_caller]
fn fails(reference: &str, parts: &[&str]) {
    let error = fetch(reference).unwrap_err();
    assert!(error.starts_with(reference), "{error}");
    assert!(!error.contains('\n'), "{error}");
    for part in parts {
        assert!(error.contains(part), "`{part}` is missing in: {error}");
    }
}

#[test]
fn a_component_comes_by_the_digest_of_its_manifest() {
    let registry = Registry::start();
    let reference = registry.push(COMPONENT);
    assert_eq!(fetch(&reference).unwrap(), COMPONENT);
    let asked: Vec<String> = registry.asked().into_iter().map(|(path, _)| path).collect();
    let digest = Digest::of(manifest(COMPONENT).to_string().as_bytes());
    assert_eq!(
        asked,
        [
            format!("/v2/me/builder/manifests/{digest}"),
            blob(COMPONENT)
        ]
    );
}

#[test]
fn what_is_not_named_by_digest_is_refused_without_the_network() {
    let registry = Registry::start();
    let host = registry.address;
    let digest = Digest::of(COMPONENT);
    for (reference, part) in [
        (
            format!("oci://{host}/me/builder:1.0"),
            "names no digest, and what a tag points to may change",
        ),
        (format!("oci://{host}/me/builder"), "names no digest"),
        (
            format!("oci://{host}/me/builder:1.0@{digest}"),
            "leave the tag out",
        ),
        (
            format!("oci://{host}/me/builder@sha256:abc"),
            "64 hexadecimal digits",
        ),
        (
            format!("oci://{host}/me/builder@sha512:{}", "a".repeat(128)),
            "not a SHA-256",
        ),
        (
            format!("oci://me/builder@{digest}"),
            "does not begin with a registry's host",
        ),
        (
            format!("oci://builder@{digest}"),
            "does not begin with a registry's host",
        ),
        (
            format!("oci://{host}/Me Builder@{digest}"),
            "is not a reference",
        ),
        (format!("oci://{host}/../x@{digest}"), "is not a reference"),
        (
            format!("https://{host}/builder.wasm"),
            "components do not come by `https://`",
        ),
    ] {
        let error = fetch(&reference).unwrap_err();
        assert!(error.contains(part), "`{part}` is missing in: {error}");
        assert!(
            error.contains("oci://registry/repository@sha256:"),
            "{error}"
        );
    }
    assert!(registry.asked().is_empty());
}

#[test]
fn what_the_registry_does_not_have_is_said() {
    let registry = Registry::start();
    fails(
        &registry.reference(Digest::of(b"nothing")),
        &[
            "the registry has no manifest of this digest",
            "push it again",
        ],
    );
    let reference = registry.push(COMPONENT);
    registry.reply(&blob(COMPONENT), Reply::status(404));
    fails(&reference, &["the registry has no layer sha256:"]);
    registry.reply(&blob(COMPONENT), Reply::status(503));
    fails(&reference, &["status 503 for layer sha256:"]);
}

#[test]
fn other_bytes_than_the_digest_says_are_not_used() {
    let registry = Registry::start();
    let reference = registry.push(COMPONENT);
    registry.reply(&blob(COMPONENT), Reply::of("\0asm another"));
    fails(
        &reference,
        &["the bytes of layer sha256:", "nothing was used"],
    );

    let digest = Digest::of(b"promised");
    let bytes = manifest(COMPONENT).to_string();
    registry.reply(
        &format!("/v2/me/builder/manifests/{digest}"),
        Reply::of(bytes),
    );
    fails(
        &registry.reference(digest),
        &["the bytes of manifest of this digest have the digest sha256:"],
    );
}

#[test]
fn what_is_packaged_otherwise_is_said() {
    let registry = Registry::start();
    let changed = |pointer: &str, to: Value| {
        let mut manifest = manifest(COMPONENT);
        *manifest.pointer_mut(pointer).unwrap() = to;
        registry.push_manifest(&manifest)
    };
    registry.push(COMPONENT);
    let layer = manifest(COMPONENT)["layers"][0].clone();
    for (reference, part) in [
        (
            changed(
                "/config/mediaType",
                json!("application/vnd.oci.image.config.v1+json"),
            ),
            "its config is `application/vnd.oci.image.config.v1+json`, not `application/vnd.wasm.config.v0+json`",
        ),
        (
            changed(
                "/layers/0/mediaType",
                json!("application/vnd.oci.image.layer.v1.tar+gzip"),
            ),
            "its layer is `application/vnd.oci.image.layer.v1.tar+gzip`, not `application/wasm`",
        ),
        (
            changed(
                "/mediaType",
                json!("application/vnd.docker.distribution.manifest.v2+json"),
            ),
            "its manifest is `application/vnd.docker",
        ),
        (changed("/layers", json!([])), "it has 0 layers, not one"),
        (
            changed("/layers", json!([layer, layer])),
            "it has 2 layers, not one",
        ),
        (
            changed("/layers/0/digest", json!("md5:00")),
            "its layer's digest is `md5:00`, no SHA-256",
        ),
        (
            changed("/layers/0/digest", json!("../../../x")),
            "no SHA-256",
        ),
        (
            changed("/layers/0/size", json!(-1)),
            "its layer's size is -1",
        ),
        (registry.push_manifest(&json!([1])), "does not read"),
        (
            registry.push_manifest(&json!({ "schemaVersion": 2, "manifests": [
                { "mediaType": LAYER, "digest": Digest::of(COMPONENT), "size": 1 }
            ] })),
            "the digest is of an index",
        ),
    ] {
        fails(&reference, &["is no packaged component", part]);
    }
    assert!(
        registry
            .asked()
            .iter()
            .all(|(path, _)| !path.contains("/blobs/"))
    );
}

#[test]
fn more_than_a_component_may_have_is_not_read() {
    let registry = Registry::start();
    let large = vec![7; 5000];
    let reference = registry.push(&large);
    fails(&reference, &["more than 4096 bytes"]);
    assert!(
        registry
            .asked()
            .iter()
            .all(|(path, _)| path != &blob(&large))
    );

    // One that lies about its size.
    let mut lying = manifest(&large);
    lying["layers"][0]["size"] = json!(10);
    fails(&registry.push_manifest(&lying), &["more than 4096 bytes"]);

    let digest = Digest::of(b"large manifest");
    let bytes = vec![b' '; (1 << 20) + 1];
    registry.reply(
        &format!("/v2/me/builder/manifests/{digest}"),
        Reply::of(bytes),
    );
    fails(
        &registry.reference(digest),
        &["manifest of this digest has more than 1048576 bytes"],
    );
}

#[test]
fn a_registry_that_does_not_answer_is_not_waited_for() {
    let registry = Registry::start();
    let reference = registry.push(COMPONENT);
    registry.reply(
        &blob(COMPONENT),
        Reply {
            delay: Duration::from_secs(3600),
            ..Reply::of(COMPONENT)
        },
    );
    let source: Source = reference.parse().unwrap();
    let limits = FetchLimits {
        timeout: Duration::from_millis(300),
        ..limits()
    };
    let error = source.fetch(None, &limits).unwrap_err().to_string();
    assert!(
        error.contains("did not answer in 0.3 s; try again"),
        "{error}"
    );
}

#[test]
fn a_registry_that_is_not_there_is_said() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let digest = Digest::of(COMPONENT);
    fails(
        &format!("oci://{address}/me/builder@{digest}"),
        &["the registry cannot be reached", "check its name"],
    );
}

#[test]
fn redirections_are_followed_a_few_times_and_never_to_plain_http_elsewhere() {
    let registry = Registry::start();
    let reference = registry.push(COMPONENT);
    registry.reply("/store/1", Reply::of(COMPONENT));
    registry.reply(&blob(COMPONENT), Reply::redirect("/store/1".to_owned()));
    assert_eq!(fetch(&reference).unwrap(), COMPONENT);

    // The place that it is redirected to is believed no more than the registry.
    registry.reply("/store/1", Reply::of("something else"));
    fails(&reference, &["nothing was used"]);

    registry.reply("/store/1", Reply::redirect(blob(COMPONENT)));
    fails(&reference, &["was redirected", "more than 5 times"]);

    registry.reply(
        &blob(COMPONENT),
        Reply::redirect("http://example.invalid/x".to_owned()),
    );
    fails(
        &reference,
        &["was redirected to http://example.invalid/x, which is not https"],
    );
}

#[test]
fn a_token_that_anyone_gets_is_fetched_and_not_carried_elsewhere() {
    let registry = Registry::start();
    let other = Registry::start();
    let reference = registry.push(COMPONENT);
    let digest = Digest::of(manifest(COMPONENT).to_string().as_bytes());
    registry.reply(
        &format!("/v2/me/builder/manifests/{digest}"),
        Reply {
            token: Some("for-anyone"),
            ..Reply::of(manifest(COMPONENT).to_string())
        },
    );
    registry.reply(
        &blob(COMPONENT),
        Reply {
            token: Some("for-anyone"),
            ..Reply::redirect(format!("http://{}/elsewhere", other.address))
        },
    );
    other.reply("/elsewhere", Reply::of(COMPONENT));
    registry.challenge(format!(
        "Bearer realm=\"http://{}/token\",service=\"here\",scope=\"repository:me/builder:pull,push\"",
        registry.address
    ));
    registry.reply("/token", Reply::of(r#"{"token":"for-anyone"}"#));
    assert_eq!(fetch(&reference).unwrap(), COMPONENT);
    let asked = registry.asked();
    let (token, authorization) = &asked[1];
    assert_eq!(
        token,
        "/token?service=here&scope=repository%3Ame%2Fbuilder%3Apull%2Cpush"
    );
    assert_eq!(*authorization, None);
    // Another host gets no token that was for this one: its address differs by the port alone.
    assert_eq!(other.asked(), [("/elsewhere".to_owned(), None)]);
}

#[test]
fn a_registry_that_asks_for_credentials_is_said() {
    let registry = Registry::start();
    let reference = registry.push(COMPONENT);
    let digest = Digest::of(manifest(COMPONENT).to_string().as_bytes());
    let path = format!("/v2/me/builder/manifests/{digest}");
    let private = Reply {
        token: Some("secret"),
        ..Reply::of("")
    };
    registry.reply(&path, private);
    let parts = [
        "asks for credentials for manifest of this digest (status 401)",
        "give the path",
    ];
    // Without a challenge; with Basic; with a token service that gives none; with one in plain http elsewhere, which is not asked.
    fails(&reference, &parts);
    let realm = format!("Bearer realm=\"http://{}/token\"", registry.address);
    for challenge in [
        "Basic realm=\"here\"",
        &realm,
        "Bearer realm=\"http://example.invalid/token\"",
        "Bearer realm=\"unclosed",
        "Bearer",
    ] {
        registry.challenge(challenge.to_owned());
        fails(&reference, &parts);
    }
    // A token that is not good enough.
    registry.challenge(realm);
    registry.reply("/token", Reply::of(r#"{"access_token":"other"}"#));
    fails(&reference, &parts);
    registry.reply(&path, Reply::status(403));
    fails(&reference, &["(status 403)"]);
}
