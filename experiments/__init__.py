"""One folder per scientific claim: question, command, result; nothing in the product imports them."""
