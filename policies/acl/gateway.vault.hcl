# The gateway: API signing keys, and secrets that sandboxes of a namespace may be handed (KV v2), read only.
path "secret/data/dsec/gateway/*" {
  capabilities = ["read"]
}

path "secret/data/dsec/sandboxes/*" {
  capabilities = ["read"]
}

path "auth/token/renew-self" {
  capabilities = ["update"]
}

path "auth/token/lookup-self" {
  capabilities = ["read"]
}
