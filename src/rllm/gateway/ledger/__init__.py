"""The captured calls on disk: one writer, any number of readers."""

from rllm.gateway.ledger.ledger import Ledger as Ledger
