"""Made from squall.proto by `make proto`; do not edit."""
