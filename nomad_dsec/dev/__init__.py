"""`dsec dev`: node daemon and gateway of one machine under one supervisor and one data directory."""
