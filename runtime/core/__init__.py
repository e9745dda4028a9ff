"""The words the rest speaks in: request, plan, events, errors, cancelling, settings. Standard library only."""
