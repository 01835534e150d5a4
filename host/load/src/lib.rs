//! Load for an OpenAI-compatible server: clients, arrivals, and what they measured.
