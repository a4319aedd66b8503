"""Contains one folder per scientific claim, with the question, command and result; the product imports none of them."""
