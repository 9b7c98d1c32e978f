"""ckpttool.optimizers"""
