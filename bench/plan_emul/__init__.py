"""Plans against what they give: layouts run by stand-ins on emulated links, beside their predictions."""
