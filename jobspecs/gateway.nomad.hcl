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
