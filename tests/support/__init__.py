"""What tests of several parts need; no test lives here."""
