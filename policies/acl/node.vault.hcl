# The node daemon: registry logins (KV v2), read only.
path "secret/data/dsec/registries/*" {
  capabilities = ["read"]
}

# Its own token, to be renewed.
path "auth/token/renew-self" {
  capabilities = ["update"]
}

path "auth/token/lookup-self" {
  capabilities = ["read"]
}
