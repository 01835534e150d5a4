//! Backends of third parties: a name, the interface its components speak, the verifier's rules and an impl.
//!
//! The rules and the impl are opaque here, so that this crate knows neither wasm nor a device: whoever registers them and
//! whoever runs them agree on their types. Source of the texts: vLLM `register_backend`
//! (`vllm/v1/attention/backends/registry.py`) @0.32/0.33.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use timetable_types::Family;

use super::{Backend, BackendRow, Device, NameError, row};

/// A value of a type that only its owner and its user know.
#[derive(Clone)]
pub struct Hook(Arc<dyn Any + Send + Sync>);

impl Hook {
    /// Wraps `value`.
    pub fn new<T: Any + Send + Sync>(value: T) -> Self {
        Hook(Arc::new(value))
    }

    /// The value, if it is a `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// A backend that is not part of the product.
#[derive(Clone, Debug)]
pub struct RegisteredBackend {
    /// What it answers; its name is the one it is chosen by.
    pub row: BackendRow,
    /// The WIT interface that its components export, such as `acme:attention/ring@0.1.0`. Reported, and checked at load.
    pub interface: String,
    /// The family whose record its builders return.
    pub family: Family,
    /// Rules beyond its family's: what the verifier runs on each metadata. A backend without rules is not registered.
    pub verifier: Hook,
    /// Makes the impl that executes the metadata on a device.
    pub make_impl: Hook,
}

/// Why a backend is not registered or not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// CUSTOM is a place to fill. The field's text.
    #[error(
        "Backend CUSTOM must be registered before use. Use register_backend(Backend.CUSTOM, 'your.module.YourClass')"
    )]
    CustomNotRegistered,
    /// The name is taken. The field's text.
    #[error(
        "Backend {name} already exists in AttentionBackendEnum. Use register_backend(AttentionBackendEnum.{name}, '{class}') to override."
    )]
    AlreadyExists {
        /// The name.
        name: String,
        /// The class that wanted it.
        class: String,
    },
    /// Not a name. The field's text.
    #[error("Invalid or reserved backend name: {name}")]
    InvalidName {
        /// What was given.
        name: String,
    },
    /// No such backend.
    #[error(transparent)]
    Unknown(#[from] NameError),
}

/// The name that is filled in rather than added.
const CUSTOM: &str = "CUSTOM";

/// Backends by name: those of the product, and those that were registered.
#[derive(Clone, Debug, Default)]
pub struct BackendRegistry {
    added: BTreeMap<String, RegisteredBackend>,
}

impl BackendRegistry {
    /// Only the product's own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `backend` under its row's name, which must be new: upper case, because the command line upper-cases names.
    /// `CUSTOM` may be registered again and is then replaced.
    ///
    /// # Errors
    /// [`RegisterError::InvalidName`], [`RegisterError::AlreadyExists`].
    pub fn register(&mut self, backend: RegisteredBackend) -> Result<(), RegisterError> {
        let name = backend.row.name.to_string();
        if name != CUSTOM {
            if !is_identifier(&name) || name == "AUTO" {
                return Err(RegisterError::InvalidName { name });
            }
            if Backend::from_name(&name).is_some() || self.added.contains_key(&name) {
                return Err(RegisterError::AlreadyExists {
                    class: backend.row.class_path(),
                    name,
                });
            }
        }
        self.added.insert(name, backend);
        Ok(())
    }

    /// Puts `backend` in place of the one of the same name, the product's own included.
    ///
    /// # Errors
    /// [`RegisterError::Unknown`] where there is none to replace.
    pub fn replace(&mut self, backend: RegisteredBackend) -> Result<(), RegisterError> {
        let name = backend.row.name.to_string();
        if name != CUSTOM && Backend::from_name(&name).is_none() && !self.added.contains_key(&name)
        {
            return Err(self.unknown(&name).into());
        }
        self.added.insert(name, backend);
        Ok(())
    }

    /// Undoes [`replace`](Self::replace) or [`register`](Self::register).
    pub fn clear_override(&mut self, name: &str) -> bool {
        self.added.remove(name).is_some()
    }

    /// Was `name` registered or replaced?
    pub fn is_overridden(&self, name: &str) -> bool {
        self.added.contains_key(name)
    }

    /// The registered backend called `name`; none for the product's own.
    pub fn registered(&self, name: &str) -> Option<&RegisteredBackend> {
        self.added.get(name)
    }

    /// What the backend called `name` answers on `device`.
    ///
    /// # Errors
    /// [`RegisterError::CustomNotRegistered`], [`RegisterError::Unknown`].
    pub fn row(&self, name: &str, device: Device) -> Result<BackendRow, RegisterError> {
        if let Some(added) = self.added.get(name) {
            return Ok(added.row.clone());
        }
        match Backend::from_name(name) {
            Some(backend) => Ok(row(backend, device)),
            None if name == CUSTOM => Err(RegisterError::CustomNotRegistered),
            None => Err(self.unknown(name).into()),
        }
    }

    /// The name that the operator's `--attention-backend` means: upper-cased; none for `auto`.
    ///
    /// # Errors
    /// [`NameError`], listing every name.
    pub fn parse(&self, text: &str) -> Result<Option<String>, NameError> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(None);
        }
        let name = text.to_ascii_uppercase();
        if name == CUSTOM || Backend::from_name(&name).is_some() || self.added.contains_key(&name) {
            Ok(Some(name))
        } else {
            Err(self.unknown(text))
        }
    }

    /// Every name, the product's own first.
    pub fn names(&self) -> Vec<&str> {
        let own = Backend::ALL.iter().map(|b| b.name());
        let added = self.added.keys().map(String::as_str);
        let mut names: Vec<&str> = own.collect();
        names.extend(added.filter(|n| Backend::from_name(n).is_none()));
        names
    }

    fn unknown(&self, name: &str) -> NameError {
        let mut names = self.names();
        if !names.contains(&CUSTOM) {
            names.push(CUSTOM);
        }
        NameError {
            name: name.to_owned(),
            valid: names.join(", "),
        }
    }
}

/// An upper-case identifier.
fn is_identifier(name: &str) -> bool {
    let word = |c: char| c == '_' || c.is_ascii_uppercase() || c.is_ascii_digit();
    name.starts_with(|c: char| c.is_ascii_uppercase()) && name.chars().all(word)
}
