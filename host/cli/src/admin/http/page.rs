//! The page's own files, which are in the binary.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

/// Path, type, text.
const FILES: [(&str, &str, &str); 7] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_str!("../page/index.html"),
    ),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("../page/page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("../page/page.js"),
    ),
    (
        "/host.js",
        "text/javascript; charset=utf-8",
        include_str!("../page/host.js"),
    ),
    (
        "/chart.js",
        "text/javascript; charset=utf-8",
        include_str!("../page/chart.js"),
    ),
    (
        "/change.js",
        "text/javascript; charset=utf-8",
        include_str!("../page/change.js"),
    ),
    (
        "/icon.svg",
        "image/svg+xml",
        include_str!("../page/icon.svg"),
    ),
];

/// Does a file of the page lie there?
pub fn is_file(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

/// The files beside `router`.
pub fn routes(router: Router) -> Router {
    FILES
        .into_iter()
        .fold(router, |router, (path, kind, text)| {
            router.route(
                path,
                get(move || async move { ([(CONTENT_TYPE, kind)], text) }),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::FILES;

    /// The content security policy would refuse them, and without a network they would not be there.
    #[test]
    fn the_page_has_no_inline_script_or_style_and_asks_nobody_else() {
        for (path, _, text) in FILES {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for foreign in [
                "http://",
                "https://",
                "//cdn",
                "@import",
                "eval(",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
            ] {
                assert!(!text.contains(foreign), "{path} has {foreign}");
            }
            if path == "/" {
                for inline in [
                    "<style",
                    " style=",
                    " onclick",
                    " onload",
                    " onsubmit",
                    "javascript:",
                ] {
                    assert!(!text.contains(inline), "{path} has {inline}");
                }
                let scripts = text.matches("<script").count();
                assert_eq!(
                    scripts,
                    text.matches("<script type=\"module\" src=").count()
                );
            }
        }
    }
}
