"""The question about attention: how far its weights can single out what matters."""
