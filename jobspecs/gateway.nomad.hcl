# The gateway. One instance: its database is a file, and clients find it again at the same place after a restart.

variable "dsec" {
  type    = string
  default = "/opt/dsec/bin/dsec"
}

variable "nodes" {
  type        = string
  default     = "unix:/var/lib/dsec/node/node.sock"
  description = "node endpoints with commas between: unix:/path or http://host:port#token"
}

variable "consul_address" {
  type        = string
  default     = ""
  description = "http(s)://host:port of the client's Consul agent, which tells of the nodes; empty: only var.nodes"
}

variable "consul_token" {
  type        = string
  default     = ""
  description = "where the client keeps a token with policies/acl/gateway.consul.hcl, such as file:/etc/dsec/consul-token"
}

variable "node_token" {
  type        = string
  default     = ""
  description = "where the nodes' token is: file:/path, vault:mount/path#key; {node} in it is the node's id"
}

variable "host" {
  type        = string
  default     = ".*"
  description = "regular expression for the client's name: the one that keeps the database"
}

job "dsec-gateway" {
  type     = "service"
  priority = 70

  constraint {
    attribute = "${attr.unique.hostname}"
    operator  = "regexp"
    value     = var.host
  }

  group "gateway" {
    count = 1

    # The database stays on this client; a second gateway elsewhere would know nothing of its keys.
    ephemeral_disk {
      sticky  = true
      migrate = true
      size    = 500
    }

    restart {
      attempts = 10
      interval = "5m"
      delay    = "1s"
      mode     = "delay"
    }

    network {
      mode = "host"
      port "http" {
        static = 8642
      }
    }

    task "gateway" {
      driver = "raw_exec"
      # Node sockets are root's. With nodes by TCP any user will do.
      user         = "root"
      kill_signal  = "SIGTERM"
      kill_timeout = "15s"

      config {
        command = var.dsec
        args = [
          "gateway", "run",
          "--data", "${NOMAD_ALLOC_DIR}/data",
          "--host", "0.0.0.0",
          "--port", "${NOMAD_PORT_http}",
          "--nodes", var.nodes,
        ]
      }

      # Tokens by reference: a job's env is for every operator to read. Consul never tells a node's token.
      env {
        DSEC_CONSUL_ADDRESS     = var.consul_address
        DSEC_CONSUL_TOKEN       = var.consul_token
        DSEC_GATEWAY_NODE_TOKEN = var.node_token
        DSEC_GATEWAY_ADVERTISE  = "${attr.unique.network.ip-address}"
      }

      resources {
        cpu    = 1000
        memory = 512
      }

      service {
        name     = "dsec-gateway"
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
