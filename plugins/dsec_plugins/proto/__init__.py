"""Wire contract of Nomad plugins: .proto files of ours and the code generated from them (`make proto`)."""
