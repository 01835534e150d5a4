//! The parameters of a request's address, and the reload that they describe.
//!
//! Must never know: HTTP beyond the query's own notation.

use std::str::FromStr;

use timetable_sandbox::{Canary, Gates, ReloadPlan, TenantName};

/// Parameters that have not been taken yet.
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Reads what follows the question mark.
    ///
    /// # Errors
    /// It is not encoded as forms are.
    pub fn parse(text: &str) -> Result<Self, String> {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            Ok((decode(name)?, decode(value)?))
        };
        let parts = text.split('&').filter(|part| !part.is_empty());
        parts.map(pair).collect::<Result<_, String>>().map(Self)
    }

    /// Every value of `name`.
    pub fn all(&mut self, name: &str) -> Vec<String> {
        let taken = self.0.extract_if(.., |(known, _)| known == name);
        taken.map(|(_, value)| value).collect()
    }

    /// The value of `name`, if it is there and not empty.
    ///
    /// # Errors
    /// It is there twice.
    pub fn one(&mut self, name: &str) -> Result<Option<String>, String> {
        let mut all = self.all(name);
        match all.len() {
            0 | 1 => Ok(all.pop().filter(|value| !value.is_empty())),
            count => Err(format!("{name} is there {count} times; give it once")),
        }
    }

    /// As [`Query::one`], read as `what`.
    ///
    /// # Errors
    /// It is there twice, or is something else.
    pub fn read<T: FromStr>(&mut self, name: &str, what: &str) -> Result<Option<T>, String> {
        let value = self.one(name)?;
        let read = |value: String| {
            let parsed = value.parse();
            parsed.map_err(|_| format!("{name} is {value:?}; give {what}"))
        };
        value.map(read).transpose()
    }

    /// Nothing is left.
    ///
    /// # Errors
    /// A parameter that nobody took: which, and which there are.
    pub fn end(self, known: &str) -> Result<(), String> {
        match self.0.first() {
            Some((name, _)) => Err(format!("there is no parameter {name:?}; there are {known}")),
            None => Ok(()),
        }
    }
}

/// `%41` and `+` undone.
fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || (rest.next()? as char).to_digit(16);
                let value = digit().and_then(|high| Some(high * 16 + digit()?));
                value.ok_or_else(|| format!("{text:?} has a % without two hexadecimal digits"))?
                    as u8
            }
            other => other,
        });
    }
    String::from_utf8(bytes).map_err(|_| format!("{text:?} is not UTF-8"))
}

/// What a reload's address says; the body is the component, and its signature behind it.
#[derive(Debug, PartialEq)]
pub struct ReloadQuery {
    pub backend: String,
    pub tenant: Option<TenantName>,
    pub origin: String,
    pub signature_bytes: u64,
    /// None: those of the version before.
    pub options: Option<Vec<(String, String)>>,
    /// None: the host's own.
    pub plan: Option<ReloadPlan>,
}

impl ReloadQuery {
    const KNOWN: &str = "backend, tenant, origin, signature_bytes, option, immediate, shadow_steps, canary_per_mille, canary_tenant, canary_steps, max_build_ratio, max_extra_build_us, max_fuel_ratio, max_differences, max_faults, min_observed_per_mille";

    /// Reads all of `query`.
    ///
    /// # Errors
    /// What is missing, unknown or makes no sense.
    pub fn read(mut query: Query) -> Result<Self, String> {
        let option = |option: String| {
            let (name, value) = option
                .split_once('=')
                .ok_or_else(|| format!("option is {option:?}; give KEY=VALUE"))?;
            Ok((name.to_owned(), value.to_owned()))
        };
        let options = query.all("option").into_iter().map(option);
        let options: Vec<(String, String)> = options.collect::<Result<_, String>>()?;
        let read = Self {
            backend: backend(&mut query)?,
            tenant: tenant(&mut query)?,
            origin: query
                .one("origin")?
                .unwrap_or_else(|| "the admin page".to_owned()),
            signature_bytes: query
                .read("signature_bytes", "a number of bytes")?
                .unwrap_or(0),
            options: (!options.is_empty()).then_some(options),
            plan: plan(&mut query)?,
        };
        query.end(Self::KNOWN)?;
        Ok(read)
    }
}

/// Whose builder, and of which backend, a rollback is about.
///
/// # Errors
/// What is missing, unknown or makes no sense.
pub fn rollback(mut query: Query) -> Result<(String, Option<TenantName>), String> {
    let whose = (backend(&mut query)?, tenant(&mut query)?);
    query.end("backend, tenant")?;
    Ok(whose)
}

fn backend(query: &mut Query) -> Result<String, String> {
    let backend = query.one("backend")?;
    backend.ok_or_else(|| "backend is missing; give FLASH_ATTN, FLASHINFER, …".to_owned())
}

fn tenant(query: &mut Query) -> Result<Option<TenantName>, String> {
    query.read("tenant", "a tenant's name")
}

fn plan(query: &mut Query) -> Result<Option<ReloadPlan>, String> {
    const STEPS: &str = "a whole number of steps";
    const NUMBER: &str = "a whole number";
    const RATIO: &str = "a number, or inf";
    let mut gates = Gates::default();
    let mut gated = None;
    macro_rules! gate {
        ($($name:ident: $what:ident,)*) => {
            $(if let Some(value) = query.read(stringify!($name), $what)? {
                gates.$name = value;
                gated = Some(stringify!($name));
            })*
        };
    }
    gate! {
        max_build_ratio: RATIO,
        max_extra_build_us: NUMBER,
        max_fuel_ratio: RATIO,
        max_differences: STEPS,
        max_faults: NUMBER,
        min_observed_per_mille: NUMBER,
    }
    let immediate = query.read("immediate", "true or false")?.unwrap_or(false);
    let shadow: Option<u32> = query.read("shadow_steps", STEPS)?;
    let per_mille: Option<u32> =
        query.read("canary_per_mille", "steps of a thousand, 1 to 1,000")?;
    let tenant = |name: String| {
        let parsed: Result<TenantName, _> = name.parse();
        parsed.map_err(|error| format!("canary_tenant: {error}"))
    };
    let tenants = query.all("canary_tenant").into_iter().map(tenant);
    let tenants: Vec<TenantName> = tenants.collect::<Result<_, String>>()?;
    let steps: Option<u32> = query.read("canary_steps", STEPS)?;
    let canary = (per_mille.is_some() || !tenants.is_empty() || steps.is_some()).then(|| Canary {
        per_mille: per_mille.unwrap_or(0),
        tenants,
        steps: steps.unwrap_or(Canary::default().steps),
    });
    let plan = ReloadPlan {
        shadow_steps: shadow.unwrap_or(0),
        canary,
        gates,
    };
    match (immediate, plan.is_immediate(), gated) {
        (true, false, _) => {
            Err("immediate goes with no stage; leave it or the stages out".to_owned())
        }
        (_, true, Some(gate)) => Err(format!(
            "{gate} is a gate of a stage, and there is none; give shadow_steps or canary_per_mille as well"
        )),
        (true, true, None) => Ok(Some(plan)),
        (false, true, None) => Ok(None),
        (false, false, _) => Ok(Some(plan)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reload(text: &str) -> Result<ReloadQuery, String> {
        ReloadQuery::read(Query::parse(text)?)
    }

    #[test]
    fn a_reload_is_read_from_its_address() {
        let plain = reload("backend=FLASH_ATTN").unwrap();
        assert_eq!(
            (plain.plan, plain.options, plain.tenant),
            (None, None, None)
        );
        assert_eq!(
            reload("backend=A&immediate=true").unwrap().plan,
            Some(ReloadPlan::default())
        );
        let full = reload(
            "backend=FLASH_ATTN&tenant=acme&origin=my+%C3%BC%26.wasm&option=a%3Db=c&option=d=&signature_bytes=7\
             &shadow_steps=20&canary_per_mille=50&canary_steps=9&max_build_ratio=inf&min_observed_per_mille=0",
        )
        .unwrap();
        assert_eq!(
            (full.origin.as_str(), full.signature_bytes),
            ("my ü&.wasm", 7)
        );
        assert_eq!(full.tenant.unwrap().as_str(), "acme");
        let options = [("a", "b=c"), ("d", "")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(full.options.unwrap(), options);
        let plan = full.plan.unwrap();
        assert_eq!((plan.shadow_steps, plan.problem()), (20, None));
        assert_eq!(plan.gates.max_build_ratio, f64::INFINITY);
        let canary = plan.canary.unwrap();
        assert_eq!((canary.per_mille, canary.steps), (50, 9));
        let of_tenants = reload("backend=A&canary_tenant=a&canary_tenant=b").unwrap();
        assert_eq!(of_tenants.plan.unwrap().canary.unwrap().tenants.len(), 2);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (text, expected) in [
            ("", "backend is missing"),
            ("backend=", "backend is missing"),
            ("backend=A&backend=B", "backend is there 2 times"),
            ("backend=A&colour=red", "\"colour\""),
            ("backend=A&shadow_steps=many", "shadow_steps is \"many\""),
            ("backend=A&shadow_steps=-1", "shadow_steps is \"-1\""),
            (
                "backend=A&canary_per_mille=5%25",
                "canary_per_mille is \"5%\"",
            ),
            ("backend=A&immediate=yes", "immediate is \"yes\""),
            ("backend=A&immediate=true&shadow_steps=5", "immediate"),
            ("backend=A&max_faults=2", "max_faults is a gate"),
            ("backend=A&option=x", "option is \"x\""),
            ("backend=A&tenant=Not%20A%20Name", "tenant is"),
            ("backend=%zz", "hexadecimal"),
            ("backend=%4", "hexadecimal"),
            ("backend=%ff", "UTF-8"),
        ] {
            let error = reload(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
