# The node daemon, one on every client of a node pool. It must run as root and sees the whole machine: raw_exec.

variable "node_pool" {
  type    = string
  default = "default"
}

variable "dsec" {
  type        = string
  default     = "/opt/dsec/bin/dsec"
  description = "the dsec command on the clients"
}

variable "alloc_dir" {
  type        = string
  default     = "/var/lib/nomad/alloc"
  description = "alloc_dir of the clients: tasks' directories below it may be shown inside sandboxes"
}

variable "consul_address" {
  type        = string
  default     = ""
  description = "http(s)://host:port of each client's Consul agent, where gateways find the nodes; empty: none"
}

variable "consul_token" {
  type        = string
  default     = ""
  description = "where the clients keep a token with policies/acl/node.consul.hcl, such as file:/etc/dsec/consul-token"
}

variable "node_token" {
  type        = string
  default     = ""
  description = "where the token is that gateways must show, such as file:/etc/dsec/node-token; empty: made by each node"
}

job "dsec-node" {
  type      = "system"
  node_pool = var.node_pool
  # Above the pools, whose grants mean nothing without it.
  priority = 80

  group "node" {
    # A daemon that died must come back where its sandboxes live, for ever: they are adopted by the next one.
    restart {
      attempts = 10
      interval = "5m"
      delay    = "1s"
      mode     = "delay"
    }

    network {
      mode = "host"
      port "http" {
        static = 8641
      }
    }

    task "daemon" {
      driver = "raw_exec"
      user   = "root"

      # SIGTERM ends the daemon and leaves the sandboxes to its successor. Clients with cgroups v1 need
      # `plugin "raw_exec" { config { enabled = true no_cgroups = true } }`: there, Nomad would otherwise kill what the
      # daemon has started together with it.
      kill_signal  = "SIGTERM"
      kill_timeout = "15s"

      config {
        command = var.dsec
        args = [
          "node", "run",
          "--data", "/var/lib/dsec/node",
          "--host", "${attr.unique.network.ip-address}",
          "--port", "${NOMAD_PORT_http}",
          # What Nomad lends by dsec-pool is all that may be promised; nothing is counted twice.
          "--capacity", "granted",
          "--mount-roots", var.alloc_dir,
        ]
      }

      # Tokens by reference: a job's env is for every operator to read.
      env {
        DSEC_CONSUL_ADDRESS = var.consul_address
        DSEC_CONSUL_TOKEN   = var.consul_token
        DSEC_NODE_TOKEN     = var.node_token
      }

      # The daemon itself; the sandboxes are in cgroups of their own, paid for by the pools.
      resources {
        cpu    = 500
        memory = 512
      }

      service {
        name     = "dsec-node"
        provider = "nomad"
        port     = "http"
        tags     = ["prometheus", "metrics-path=/metrics"]

        check {
          name     = "ready"
          type     = "http"
          path     = "/readyz"
          interval = "5s"
          timeout  = "2s"
        }
      }
    }
  }
}
